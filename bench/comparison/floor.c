/*
 * The physical floor of a sandbox: what the kernel alone takes for a process in new namespaces, with nothing around it that
 * makes it useful or safe. Speaks the words of bench/README.md on stdin and stdout.
 *
 * No root file system of its own, no limits, no filter of system calls: whoever has these takes longer.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NAMESPACES (CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
#define MAX_SESSIONS 200
#define MAX_SAMPLES 10000
#define HEAP (10 << 20)
#define BLOCK (64 << 10)

struct session {
	pid_t pid;
	int to, from;
};

static struct session warm = { 0, -1, -1 };
static struct session idle[MAX_SESSIONS];
static int idle_count;
static char block[BLOCK];

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void failed(const char *what)
{
	printf("{\"error\": \"%s: %s\"}\n", what, strerror(errno));
	fflush(stdout);
	exit(1);
}

/* As fork(), in namespaces of its own. The raw call: glibc's fork takes no flags. */
static pid_t in_namespaces(void)
{
	pid_t pid = (pid_t)syscall(SYS_clone, NAMESPACES | SIGCHLD, NULL, NULL, NULL, NULL);
	if (pid < 0)
		failed("clone with new namespaces");
	return pid;
}

/* /bin/true in namespaces of its own; not waited for. */
static pid_t start_true(void)
{
	pid_t pid = in_namespaces();
	if (pid == 0) {
		execl("/bin/true", "true", (char *)NULL);
		_exit(127);
	}
	return pid;
}

static void reap(pid_t pid)
{
	int status;
	if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
		failed("/bin/true in new namespaces");
}

/* A process in namespaces that answers every byte with a byte. */
static struct session start_echo(void)
{
	int to[2], from[2];
	if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC))
		failed("pipe");
	pid_t pid = in_namespaces();
	if (pid == 0) {
		char byte;
		/* Whoever is killed leaves no echo behind: it holds no end of its own input. */
		close(to[1]);
		close(from[0]);
		while (read(to[0], &byte, 1) == 1 && write(from[1], &byte, 1) == 1)
			;
		_exit(0);
	}
	close(to[0]);
	close(from[1]);
	return (struct session){ pid, to[1], from[0] };
}

static void call(struct session *session)
{
	char byte = 42;
	if (write(session->to, &byte, 1) != 1 || read(session->from, &byte, 1) != 1 || byte != 42)
		failed("a call");
}

static void end(struct session *session)
{
	close(session->to);
	close(session->from);
	kill(session->pid, SIGKILL);
	waitpid(session->pid, NULL, 0);
}

static void answer_samples(const double *seconds, int count, double all)
{
	printf("{\"seconds\": [");
	for (int index = 0; index < count; index++)
		printf("%s%.9f", index ? ", " : "", seconds[index]);
	if (all > 0)
		printf("], \"all\": %.9f}\n", all);
	else
		printf("]}\n");
}

static void together(int ways, int count)
{
	static double seconds[MAX_SESSIONS], begun[MAX_SESSIONS];
	static pid_t pids[MAX_SESSIONS];
	int started = 0, ended = 0;
	double start = now();
	while (ended < count) {
		while (started < count && started - ended < ways) {
			begun[started] = now();
			pids[started] = start_true();
			started++;
		}
		int status;
		pid_t pid = waitpid(-1, &status, 0);
		int index = 0;
		while (index < started && pids[index] != pid)
			index++;
		if (pid < 0 || index == started || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
			failed("/bin/true in new namespaces");
		seconds[index] = now() - begun[index];
		ended++;
	}
	answer_samples(seconds, count, now() - start);
}

static void flood(long long bytes)
{
	int from[2];
	if (pipe2(from, O_CLOEXEC))
		failed("pipe");
	double start = now();
	pid_t pid = in_namespaces();
	if (pid == 0) {
		for (long long left = bytes; left > 0;) {
			ssize_t part = write(from[1], block, left < BLOCK ? (size_t)left : BLOCK);
			if (part <= 0)
				_exit(1);
			left -= part;
		}
		_exit(0);
	}
	close(from[1]);
	long long seen = 0;
	for (ssize_t part; (part = read(from[0], block, BLOCK)) > 0;)
		seen += part;
	double time = now() - start;
	close(from[0]);
	reap(pid);
	if (seen != bytes)
		failed("output");
	answer_samples(&time, 1, 0);
}

/* A process with a heap copies itself, and the copy answers. */
static void copy(void)
{
	static char *heap;
	int from[2];
	if (!heap) {
		heap = mmap(NULL, HEAP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (heap == MAP_FAILED)
			failed("mmap");
		memset(heap, 1, HEAP);
	}
	if (pipe2(from, O_CLOEXEC))
		failed("pipe");
	double start = now();
	pid_t pid = in_namespaces();
	if (pid == 0)
		_exit(write(from[1], heap, 1) == 1 ? 0 : 1);
	char byte;
	if (read(from[0], &byte, 1) != 1)
		failed("a copy");
	double time = now() - start;
	close(from[0]);
	close(from[1]);
	reap(pid);
	answer_samples(&time, 1, 0);
}

static void shut(void)
{
	while (idle_count > 0)
		end(&idle[--idle_count]);
}

static void answer(char *line)
{
	int ways, count;
	long long bytes;
	if (strncmp(line, "hello", 5) == 0) {
		printf("{\"version\": \"one clone(2)\"}\n");
	} else if (strncmp(line, "create python", 13) == 0) {
		/* No python, and no more than what every python needs too. */
		double start = now();
		reap(start_true());
		double time = now() - start;
		answer_samples(&time, 1, 0);
	} else if (sscanf(line, "warm python %d", &count) == 1 && count > 0 && count <= MAX_SAMPLES) {
		static double seconds[MAX_SAMPLES];
		if (warm.to < 0)
			warm = start_echo();
		call(&warm);
		for (int index = 0; index < count; index++) {
			double start = now();
			call(&warm);
			seconds[index] = now() - start;
		}
		answer_samples(seconds, count, 0);
	} else if (sscanf(line, "together %d %d", &ways, &count) == 2 && ways > 0 && count > 0 && count <= MAX_SESSIONS) {
		together(ways, count);
	} else if (sscanf(line, "burst %d", &count) == 1 && count > 0 && count <= MAX_SESSIONS) {
		together(count, count);
	} else if (sscanf(line, "flood %lld", &bytes) == 1 && bytes > 0) {
		flood(bytes);
	} else if (strncmp(line, "fork", 4) == 0) {
		copy();
	} else if (sscanf(line, "open %d", &count) == 1 && count >= 0 && idle_count + count <= MAX_SESSIONS) {
		for (int index = 0; index < count; index++) {
			idle[idle_count] = start_echo();
			call(&idle[idle_count++]);
		}
		printf("{\"pids\": [%d", getpid());
		for (int index = 0; index < idle_count; index++)
			printf(", %d", idle[index].pid);
		printf("]}\n");
	} else if (strncmp(line, "shut", 4) == 0) {
		shut();
		printf("{}\n");
	} else {
		printf("{\"cannot\": \"it is the kernel's part of a sandbox, and nothing else\"}\n");
	}
	fflush(stdout);
}

int main(void)
{
	char line[256];
	while (fgets(line, sizeof line, stdin))
		answer(line);
	shut();
	if (warm.to >= 0)
		end(&warm);
	return 0;
}
