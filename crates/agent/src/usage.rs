//! What the sandbox uses now, and what it may use from now on.

use std::time::Duration;

use carrel_jail::tree;
use carrel_proto::{limits::Limits, message::Usage};

use crate::{process, serve::Agent};

impl Agent {
    /// `idle`: since when nobody wanted anything.
    pub(crate) fn usage(&self, idle: Duration) -> Usage {
        let reading = self.meters.read();
        let (memory, cpu_us, processes) =
            match (self.meters.memory(), reading.cpu_us, self.meters.processes()) {
                (Some(memory), Some(cpu), Some(processes)) => (memory, cpu, processes),
                // Not every controller is there: what is missing is counted by hand.
                (memory, cpu, processes) => {
                    let me = rustix::process::getpid().as_raw_nonzero().get();
                    let all: Vec<i32> = tree::below(me).into_iter().chain([me]).collect();
                    let (counted, ticks) = process::sum(&all);
                    let number = u64::try_from(all.len()).unwrap_or(u64::MAX);
                    (memory.unwrap_or(counted), cpu.unwrap_or(ticks), processes.unwrap_or(number))
                }
            };
        let running = self.running();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Usage {
            memory,
            peak_memory: self.meters.highest(),
            cpu_us,
            processes: u32::try_from(processes).unwrap_or(u32::MAX),
            disk_used: self.disk_used(),
            disk_limit: self.config.limits.disk.0,
            uptime_ms: millis(self.started.elapsed()),
            idle_ms: if running > 0 { 0 } else { millis(idle) },
            running: u32::try_from(running).unwrap_or(u32::MAX),
        }
    }

    fn disk_used(&self) -> u64 {
        match &self.watch {
            Some(watch) => watch.used(),
            None => rustix::fs::statvfs(&self.config.places.workspace)
                .map_or(0, |fs| fs.f_blocks.saturating_sub(fs.f_bfree) * fs.f_frsize),
        }
    }

    /// Other limits: for calls that begin and processes that start from now on. The cgroup is the host's to change.
    pub(crate) fn configure(&mut self, limits: Limits, idle_timeout_s: u64, max_lifetime_s: u64) {
        if let Some(watch) = &mut self.watch {
            watch.set_limit(limits.disk.0);
        }
        if let Some(nproc) = &mut self.config.nproc {
            *nproc = u64::from(limits.pids);
        }
        self.config.limits = limits;
        self.config.idle_timeout_s = idle_timeout_s;
        self.config.max_lifetime_s = max_lifetime_s;
    }
}
