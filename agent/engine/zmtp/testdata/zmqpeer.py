"""A ZeroMQ peer on the real libzmq, driven by JSON lines on standard input.

Each command gets one JSON line as its answer; the process ends with its input.
"""

import json
import select
import struct
import sys
import time

import zmq

END = (1 << 64) - 1


class Peer:
    def __init__(self):
        self.context = zmq.Context()
        self.socket = None

    def open(self, type, bind=None, connect=None, options=None):
        self.close()
        s = self.context.socket(getattr(zmq, type))
        s.setsockopt(zmq.LINGER, 0)
        s.setsockopt(zmq.SNDHWM, 0)
        for name, value in (options or {}).items():
            s.setsockopt(getattr(zmq, name), value)
        if connect:
            s.connect(connect)
        else:
            # A port just released may take a moment to be free.
            for attempt in range(100):
                try:
                    s.bind(bind)
                    break
                except zmq.ZMQError:
                    if attempt == 99:
                        raise
                    time.sleep(0.05)
        self.socket = s
        return s.getsockopt(zmq.LAST_ENDPOINT).decode()

    def close(self):
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def warm(self, topic):
        """Sends until the next command comes: a PUB does not say when a
        subscription has reached it, so the subscriber has to."""
        sent = 0
        while True:
            self.socket.send_multipart([topic.encode(), b"warm", b""])
            sent += 1
            if select.select([sys.stdin], [], [], 0.005)[0]:
                return sent

    def publish(self, topics, count, payload, first=0):
        """Sends messages as vLLM does: topic, sequence, payload; the topics
        take turns and share one numbering."""
        body = b"p" * payload
        for i in range(first, first + count):
            topic = topics[i % len(topics)].encode()
            self.socket.send_multipart([topic, struct.pack(">Q", i), body])
        return count

    def replay(self, until, payload, topic=None):
        """Answers one request as vLLM does: all sequences from the one asked
        for up to until, then the end marker."""
        client, empty, start = self.socket.recv_multipart()
        assert empty == b"", empty
        start = int.from_bytes(start, "big")
        body = b"p" * payload

        def send(seq, body, topic):
            frames = [client, b""] + ([] if topic is None else [topic.encode()])
            self.socket.send_multipart(frames + [struct.pack(">Q", seq), body])

        for seq in range(start, until):
            send(seq, body, topic)
        send(END, b"", None if topic is None else "")
        return start


def main():
    peer = Peer()
    print(json.dumps({"libzmq": zmq.zmq_version(), "pyzmq": zmq.__version__}), flush=True)
    while line := sys.stdin.readline():
        command = json.loads(line)
        result = getattr(peer, command.pop("do"))(**command)
        print(json.dumps({"result": result}), flush=True)
    peer.close()
    peer.context.term()


main()
