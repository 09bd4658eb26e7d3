"""Answers of which a client may ask for a part: one byte range, under a strong entity tag."""

import re

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from gateway.core.tarballs import Content

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


def content_response(request: Request, content: Content, *, tag: str, filename: str, media_type: str) -> Response:
    """Return ``content``, or the part of it that ``Range`` asks for. ``tag`` names these very bytes.

    Several ranges at once, and a range of bytes that ``If-Range`` says are others, are answered with everything.
    """
    size = content.size_bytes
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": f'"{tag}"',
        "Content-Disposition": f'attachment; filename="{filename}"',
    }
    asked = _asked(request, size, headers["ETag"])
    if asked is not None and asked[0] >= asked[1]:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"})
    start, stop = asked or (0, size)
    headers["Content-Length"] = str(stop - start)
    if asked is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    body = content.read(start, stop if request.method != "HEAD" else start)
    return StreamingResponse(body, status_code=206 if asked else 200, headers=headers, media_type=media_type)


def _asked(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """Return the range wanted as (start, stop), empty when there are no such bytes; None: everything."""
    found = _RANGE.fullmatch(request.headers.get("Range", "").replace(" ", ""))
    if found is None or request.headers.get("If-Range", tag) != tag or found[1] == found[2] == "":
        return None
    if not found[1]:
        return max(0, size - int(found[2])), size
    start, last = int(found[1]), int(found[2] or size - 1)
    return None if last < start and found[2] else (start, min(last + 1, size))
