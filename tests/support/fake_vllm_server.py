"""The server of `fake_vllm`, run as a program of its own with the standard library alone."""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = sys.argv[1:]


def option(name, default=None):
    return WORDS[WORDS.index(name) + 1] if name in WORDS else default


ROLE = json.loads(option("--kv-transfer-config", "{}")).get("kv_role", "whole")
NAME = option("--served-model-name")


def note(**event):
    with open(os.environ["FAKE_VLLM_LOG"], "a") as file:
        file.write(json.dumps({**event, "role": ROLE, "pid": os.getpid()}) + "\n")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": NAME, "object": "model"}]} if "models" in self.path else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        note(event="request", path=self.path, body=body, id=self.headers["x-request-id"])
        if ROLE == "kv_producer" and os.environ.get("FAKE_VLLM_FAIL") == "prefill":
            self.reply({"error": {"message": "broken"}}, 500)
        elif body.get("stream"):
            self.stream(body)
        else:
            self.hold(body)
            handed = {"remote_block_ids": [1], "do_remote_prefill": True} if ROLE == "kv_producer" else None
            self.reply({**self.piece(ROLE, "length"), "kv_transfer_params": handed})

    def hold(self, body):
        """Answer late where the prompt asks for it, unless the client leaves."""
        self.connection.settimeout(0.02)
        for _ in range(500 if "slow " + ROLE in str(body.get("prompt")) else 0):
            try:
                if not self.connection.recv(1):
                    note(event="left")
                    raise ConnectionResetError
            except TimeoutError:
                pass
        self.connection.settimeout(None)

    def stream(self, body):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for number in range(body["max_tokens"]):
                data = json.dumps(self.piece(f"{ROLE}{number} "))
                self.wfile.write(f"data: {data}\n\n".encode())
                time.sleep(0.02)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            note(event="left")

    def piece(self, text, reason=None):
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {
            "id": "x",
            "object": "text_completion",
            "created": 0,
            "model": NAME,
            "choices": [choice],
            "usage": usage,
        }

    def reply(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: (note(event="end", signal=number), os._exit(0)))
    note(event="start", words=WORDS, bound=os.environ.get("VLLM_CPU_OMP_THREADS_BIND"))
    Server((option("--host"), int(option("--port"))), Handler).serve_forever()
