"""Write, run, fix: the tests say what is wrong, and the next version is written from what they say."""

import carrel

TESTS = """
import unittest
from words import count

class Count(unittest.TestCase):
    def test_words(self):
        self.assertEqual(count("two words"), 2)

    def test_nothing(self):
        self.assertEqual(count(""), 0)

unittest.main()
"""

# What a model would write: a first attempt, and the one after it has read the failure.
ATTEMPTS = [
    'def count(text):\n    return len(text.split(" "))\n',
    "def count(text):\n    return len(text.split())\n",
]


def main() -> None:
    with carrel.sandbox() as sandbox:
        sandbox.files.write("test_words.py", TESTS)
        for number, program in enumerate(ATTEMPTS, 1):
            sandbox.files.write("words.py", program)
            result = sandbox.exec(["python3", "test_words.py"]).output()
            if result.ok:
                print(f"attempt {number}: passes")
                return
            failure = next(line for line in result.stderr.splitlines() if line.startswith("AssertionError"))
            print(f"attempt {number}: {failure}")
        raise SystemExit("no attempt passes")


if __name__ == "__main__":
    main()
