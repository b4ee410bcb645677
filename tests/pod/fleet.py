"""The chart's pods on this machine: which there are, and a client of their gateway."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.pod.kubelet import Pod
from tests.pod.manifests import Document, pods_of
from tests.pod.podman import Podman
from tests.pod.volumes import EMPTY_DIRS
from tests.support.processes import DEADLINE_SECONDS, until
from workers.engines.sim.tokens import expected_text

NETWORK = "hotspare-tests"
GATEWAY_PORT = 8000


class Fleet:
    """``start`` and ``stop`` pods by the ends of their names: ``gateway-0``, ``worker-1``."""

    def __init__(self, podman: Podman, documents: Sequence[Document]) -> None:
        self._podman = podman
        found = [*pods_of(documents, "Deployment"), *pods_of(documents, "StatefulSet")]
        self._manifests = {manifest.name.removeprefix("hotspare-"): manifest for manifest in found}
        self.pods: dict[str, Pod] = {}

    def __enter__(self) -> Self:
        self._clean()
        self._podman("network", "create", NETWORK)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pod in self.pods.values():
            pod.remove()
        self._clean()
        assert self._podman.names(["ps", "--all"]) == self._podman.names(["pod", "ps"]) == []
        assert str(EMPTY_DIRS) not in Path("/proc/self/mountinfo").read_text()

    def start(self, *names: str) -> None:
        """Start these at once, and wait until they are ready."""
        for name in names:
            self.pods[name] = Pod(self._podman, self._manifests[name], NETWORK)
        failures: list[BaseException] = []

        def start(pod: Pod) -> None:
            try:
                pod.start()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=start, args=(self.pods[name],)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        for name in names:
            self.pods[name].until_ready()

    def stop(self, name: str) -> dict[str, int]:
        """End a pod in order, and remove it; the exit codes of its containers."""
        pod = self.pods[name]
        codes = pod.stop()
        pod.remove()
        del self.pods[name]
        return codes

    def _clean(self) -> None:
        """What a run that was killed has left."""
        for manifest in self._manifests.values():
            Pod(self._podman, manifest, NETWORK).remove()
        if NETWORK in self._podman.names(["network", "ls"]):
            self._podman("network", "rm", "--force", NETWORK)
        assert not EMPTY_DIRS.exists() or not any(EMPTY_DIRS.iterdir())

    # --- the gateway's clients

    @property
    def url(self) -> str:
        return f"http://{self.pods['gateway-0'].address}:{GATEWAY_PORT}"

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/status", timeout=5, trust_env=False).json())

    def complete(self, prompt: str, count: int = 20) -> dict[str, Any]:
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json={"model": "sim", "prompt": prompt, "max_tokens": count},
            timeout=DEADLINE_SECONDS,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


class Stream:
    """A streamed completion, read by a thread."""

    def __init__(self, fleet: Fleet, prompt: str, count: int) -> None:
        self._url = f"{fleet.url}/v1/completions"
        self._body = {"model": "sim", "prompt": prompt, "max_tokens": count, "stream": True}
        self._expected = expected_text(prompt, count)
        self.text = ""
        self.longest_pause = 0.0
        self._failure: BaseException | None = None
        self._done = False
        self._thread = threading.Thread(target=self._read, name="stream")
        self._thread.start()

    def until(self, characters: int) -> None:
        """Until so much of it has come."""
        until(
            lambda: len(self.text) >= characters or not self._thread.is_alive(),
            saying=f"{characters} characters of the stream",
        )
        assert len(self.text) >= characters, f"it ended after {self.text!r}: {self._failure}"

    def assert_whole(self) -> None:
        """It has come to its end, and is what it would have been."""
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "the stream hangs"
        if self._failure is not None:
            raise self._failure
        assert self._done, f"it was cut after {self.text[-80:]!r}"
        assert self.text == self._expected

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=DEADLINE_SECONDS, trust_env=False) as answer:
                assert answer.status_code == 200, answer.read()
                last = time.monotonic()
                for line in answer.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    self.longest_pause = max(self.longest_pause, time.monotonic() - last)
                    last = time.monotonic()
                    if line == "data: [DONE]":
                        self._done = True
                        return
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self.text += event["choices"][0]["text"] if event["choices"] else ""
        except BaseException as error:
            self._failure = error
