#!/usr/bin/env python3
"""A slow link: passes TCP on, each way after a delay, bytes in order.

    tier_link.py LISTEN_HOST:PORT TARGET_HOST:PORT DELAY_MS JITTER_MS

Each piece of up to 64 KiB leaves DELAY_MS after it came, up to JITTER_MS later by chance (a fixed
seed), and never before the piece ahead of it.  Prints "ready" when it listens; ends on SIGTERM.
"""

import asyncio
import random
import sys


async def one_way(reader, writer, delay, jitter):
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

    async def send():
        while True:
            due, piece = await pieces.get()
            await asyncio.sleep(max(0, due - loop.time()))
            if not piece:
                break
            writer.write(piece)
            await writer.drain()

    sender = asyncio.ensure_future(send())
    try:
        while True:
            piece = await reader.read(65536)
            pieces.put_nowait((loop.time() + delay + random.random() * jitter, piece))
            if not piece:
                break
        await sender
    except OSError:
        sender.cancel()
    finally:
        writer.close()


async def main():
    (host, port), (far, far_port) = (a.rsplit(":", 1) for a in sys.argv[1:3])
    delay, jitter = (float(a) / 1000 for a in sys.argv[3:5])

    async def accepted(reader, writer):
        try:
            up = await asyncio.open_connection(far, int(far_port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(one_way(reader, up[1], delay, jitter),
                             one_way(up[0], writer, delay, jitter), return_exceptions=True)

    server = await asyncio.start_server(accepted, host, int(port))
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


random.seed(1)
if len(sys.argv) != 5:
    sys.exit(__doc__)
asyncio.run(main())
