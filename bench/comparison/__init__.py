"""carrel beside other ways to run code, in one run: see ../README.md."""
