"""A development server in a sandbox: start it, wait for its port, ask it, change a file, ask again."""

import carrel


def main() -> None:
    with carrel.sandbox() as sandbox:
        sandbox.files.write("site/index.html", "<h1>first</h1>")
        with sandbox.exec(["python3", "-m", "http.server", "8000", "--directory", "site"]):
            sandbox.ports.wait(8000)
            print("page:", sandbox.ports.request(8000, "/").text)

            sandbox.files.replace("site/index.html", "first", "second", expect=1)
            print("page:", sandbox.ports.request(8000, "/").text)

            # A link for a browser that has no token; it reaches this port and nothing else.
            link = sandbox.ports.share(8000, expires=600)
            print("shared for ten minutes:", "yes" if link.path.startswith("/shared/") else "no")


if __name__ == "__main__":
    main()
