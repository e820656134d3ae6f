"""Three steps of one workflow run. They know nothing of each other but the run's id, and share one sandbox by it."""

import uuid

import carrel


def fetch(run: str) -> None:
    carrel.sandbox(workflow_run=run).files.write("in/numbers.txt", "3\n1\n2\n")


def compute(run: str) -> None:
    sandbox = carrel.sandbox(workflow_run=run)
    sandbox.run("numbers = sorted(int(line) for line in open('in/numbers.txt'))", env="python").check()


def report(run: str) -> str:
    # The variable is the one of the step before: same key, same sandbox, same interpreter.
    result = carrel.sandbox(workflow_run=run).run("print(*numbers, sep=', ')", env="python").check()
    return result.stdout.strip()


def main() -> None:
    run = f"run_{uuid.uuid4().hex[:12]}"
    try:
        fetch(run)
        compute(run)
        print("report:", report(run))
    finally:
        closed = carrel.client().scopes.close("workflow", run)
        print("sandboxes closed:", len(closed.closed))


if __name__ == "__main__":
    main()
