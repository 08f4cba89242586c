"""An agent that asks one question, as cheaply as a client can. Only Python's standard library."""

import asyncio
import json
from urllib.parse import urlsplit


async def run(row: dict, base_url: str, api_key: str) -> None:
    """Ask once, over a connection of its own."""
    url = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    body = json.dumps({"model": "policy", "messages": row["messages"]}).encode()
    head = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Authorization: Bearer {api_key}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    status = answer.split(b" ", 2)[1]
    if status != b"200":
        raise RuntimeError(answer[:1000].decode(errors="replace"))
