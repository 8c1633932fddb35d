"""A real libzmq peer for the emulator's tests.

usage: zmqpeer.py connect EVENTS REPLAY COUNT | zmqpeer.py bind COUNT

connect: subscribes to EVENTS with heartbeats, prints COUNT messages, asks
REPLAY for everything, prints the replies, and last how often the subscription's
connection broke. bind: listens, prints "listening PORT", then COUNT messages.
Each message is one line: its kind and the frames in hex, separated by spaces.
"""
import sys
import time
import zmq
from zmq.utils.monitor import recv_monitor_message


def show(kind, frames):
    print(kind, *[f.hex() or "-" for f in frames], flush=True)


def receive(sub, count):
    for _ in range(count):
        if not sub.poll(15000):
            sys.exit("no message")
        show("live", sub.recv_multipart())


def connect(events, replay, count):
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.HEARTBEAT_IVL, 20)
    sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 200)
    sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
    monitor = sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    sub.connect(events)
    receive(sub, count)
    time.sleep(0.5)  # many heartbeats, each to be answered within 200 ms
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    while True:
        if not dealer.poll(15000):
            sys.exit("no reply")
        frames = dealer.recv_multipart()
        show("replay", frames)
        if frames[-2] == b"\xff" * 8:
            break
    broken = 0
    while monitor.poll(0):
        recv_monitor_message(monitor)
        broken += 1
    print("broken", broken, flush=True)
    sub.disable_monitor()
    context.destroy(linger=0)


def bind(count):
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    print("listening", port, flush=True)
    receive(sub, count)
    context.destroy(linger=0)


if sys.argv[1] == "connect":
    connect(sys.argv[2], sys.argv[3], int(sys.argv[4]))
else:
    bind(int(sys.argv[2]))
