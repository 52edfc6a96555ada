"""Clients of the server, for locust: each asks for texts that no other has, and looks whether the answer is of its own.

    pip install locust    # beside whyformer; nothing of whyformer needs it
    python benchmarks/jobs.py serve

runs it against batches of one and of sixteen; by hand, against a server that runs already:

    locust -f benchmarks/clients.py --headless -u 64 -r 64 -t 30s --host http://127.0.0.1:8000
"""

from __future__ import annotations

import itertools

from locust import FastHttpUser, task

WORDS = ("charming", "dull", "superb", "awful", "fine", "slow", "clever", "empty")
NUMBERS = itertools.count()


class Client(FastHttpUser):
    """One of many at once; it asks again as soon as it has an answer."""

    @task
    def explain(self) -> None:
        number = next(NUMBERS)
        text = f"{'Very ' * (number % 3)}{WORDS[number % 8]} and {WORDS[number // 8 % 8]} film number {number}."
        asked = {"text": text, "method": "transformer_attribution"}
        with self.client.post("/v1/explain/text", json=asked, catch_response=True, name="explain") as answer:
            if answer.status_code != 200:
                answer.failure(f"lost: status {answer.status_code}")
            elif answer.json()["explanations"][0]["texts"] != [text]:
                answer.failure("crossed: the answer is another's")
