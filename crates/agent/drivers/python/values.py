# Values, as they are shown.

from _io import BytesIO
from _json import make_encoder

LINE_LIMIT = 32 << 20  # the contract's longest reply line
TEXT_LIMIT = 1 << 20  # text/plain is for reading; nobody reads more than this

REPRS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
)


def show_rich(value, kind):
    """Shows a value in all the representations it offers, as Jupyter does."""
    mime = {}
    if type(value) not in PLAIN:
        offered = represent(value, "_repr_mimebundle_", include=None, exclude=None)
        if isinstance(offered, dict):
            mime.update(offered)
        for method, key in REPRS:
            if key not in mime:
                mime[key] = represent(value, method)
        if call.pyplot is not None and isinstance(value, call.pyplot.Figure):
            mime["image/png"] = picture(value)
    if mime.get("text/plain") is None:
        mime["text/plain"] = plain(value)
    show_bundle(mime, kind)


def represent(value, method, **arguments):
    """One representation, or None. Looked up on the type, since mocks and proxies claim to have any attribute."""
    try:
        if getattr(type(value), method, None) is None:
            return None
        found = getattr(value, method)(**arguments)
        return found[0] if isinstance(found, tuple) and found else found  # (data, metadata)
    except Exception as exc:
        note("%s of %s failed: %s: %s" % (method, type(value).__name__, *describe(exc)))


def show_bundle(mime, kind):
    """Sends a bundle, without what would not fit into a reply line."""
    entries, text = {}, clip(str(mime.get("text/plain", "")), TEXT_LIMIT)
    for key, value in mime.items():
        if value is not None and key != "text/plain":
            try:
                entries[key] = (quote(key) + ":" + to_json(transportable(key, value))).encode()
            except Exception as exc:
                note("%s left out: %s: %s" % (key, *describe(exc)))
    room = LINE_LIMIT - 8 * TEXT_LIMIT  # escaped, text is up to 6 times as long
    while sum(map(len, entries.values())) + len(entries) > room:
        key = max(entries, key=lambda key: len(entries[key]))
        text += "\n[%s left out: %d bytes]" % (key[:100], len(entries.pop(key)))
    emit(kind, b",".join([b'"text/plain":' + quote(text).encode(), *entries.values()]), text)


def transportable(key, value):
    """Binary types in base64, as in Jupyter."""
    if not isinstance(value, (bytes, bytearray)):
        return value
    if key.startswith("text/") or key in ("image/svg+xml", "application/json", "application/javascript"):
        return value.decode("utf-8", "replace")
    from binascii import b2a_base64

    return b2a_base64(value, newline=False).decode()


def to_json(value):
    if isinstance(value, str):
        return quote(value)
    return "".join(make_encoder({}, unjsonable, quote, None, ":", ",", False, False, False)(value, 0))


def unjsonable(value):
    raise TypeError("%s is not a JSON value" % type(value).__name__)


def clip(text, limit):
    if len(text) * 4 <= limit:
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return text
    kept = data[:limit].decode("utf-8", "ignore")
    return "%s\n[%d more bytes left out]" % (kept, len(data) - len(kept.encode()))


def picture(figure):
    """A figure as PNG. It is closed, since it has been shown; it can still be changed and shown again."""
    buffer = BytesIO()
    try:
        figure.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
    except Exception as exc:
        note("figure not shown: %s: %s" % describe(exc))
    finally:
        call.pyplot.close(figure)


def show_figures(*_, **__):
    """What plt.show() does here, and what happens to figures left open at the end of a call."""
    for number in call.pyplot.get_fignums():
        show(call.pyplot.figure(number), b"display")
