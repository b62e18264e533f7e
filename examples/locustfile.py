"""Chat completions from Locust users: `locust -f locustfile.py --host http://127.0.0.1:8000`.

Beside Locust's own row (the time until an answer begins to come) there are three: to the first token, per token after it, and whole
answers, all in ms.
"""

import json
import random
import time

from locust import HttpUser, between, task

TOPICS = ("the sea", "bread", "a bicycle", "the moon", "an old library", "rain", "a garden", "trains")


class ChatUser(HttpUser):
    """Asks, reads the answer, thinks for a moment."""

    wait_time = between(0, 1)

    @task
    def ask(self) -> None:
        """One streamed answer."""
        body = {
            "messages": [{"role": "user", "content": f"Tell me something about {random.choice(TOPICS)}."}],
            "max_tokens": 64,
            "temperature": 0.7,
            "stream": True,
        }
        begin = time.perf_counter()
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return
            lines = (line for line in response.iter_lines() if line.startswith(b"data: {"))
            times = [time.perf_counter() for line in lines if has_text(json.loads(line[6:]))]
            if not times:
                response.failure("an empty answer")
                return
        self.report("whole answer", 1000 * (time.perf_counter() - begin))
        self.report("time to first token", 1000 * (times[0] - begin))
        if len(times) > 1:
            self.report("time per token", 1000 * (times[-1] - times[0]) / (len(times) - 1))

    def report(self, name: str, milliseconds: float) -> None:
        """A row of its own in Locust's table."""
        self.environment.events.request.fire(
            request_type="chat", name=name, response_time=milliseconds, response_length=0, exception=None, context={}
        )


def has_text(event: dict) -> bool:
    """Whether an event of the stream brings text."""
    choices = event.get("choices") or []
    return bool(choices and choices[0].get("delta", {}).get("content"))
