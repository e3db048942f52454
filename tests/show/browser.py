"""A headless Chromium, driven through the WebDriver protocol of its chromedriver: HTTP and JSON.

No package is needed for it; where the two programs are not installed, there is no browser to test
with (Debian: apt-get install chromium chromium-driver).
"""

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from typing import Any

from tests.waiting import until

PROGRAMS = ("chromedriver", "chromium")


def missing() -> str:
    """The programs that are not installed, or nothing."""
    return " and ".join(name for name in PROGRAMS if shutil.which(name) is None)


class Browser:
    """One page of ``width`` x ``height`` pixels; a context manager that ends its processes."""

    def __init__(self, width: int, height: int, profile: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._base = f"http://127.0.0.1:{port}"
        switches = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--window-size={width},{height}", f"--user-data-dir={profile}"),
        ]
        options = {"binary": shutil.which("chromium"), "args": switches}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            self._wait_for_driver()
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.kill()
            raise
        self._base += f"/session/{made['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait(30)

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the JavaScript function body ``script`` returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def pointer(self, *actions: dict[str, Any]) -> None:
        """Real pointer events: moves, presses, releases."""
        mouse = {"type": "pointer", "id": "mouse", "actions": list(actions)}
        self._ask("POST", "/actions", {"actions": [mouse]})

    def move(self, x: float, y: float) -> None:
        self.pointer({"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)})

    def click(self, x: float, y: float) -> None:
        self.pointer(
            {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        )

    def wheel(self, x: float, y: float, delta: int) -> None:
        turn = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": delta}
        self._ask(
            "POST", "/actions", {"actions": [{"type": "wheel", "id": "w", "actions": [turn]}]}
        )

    def complaints(self) -> list[str]:
        """What the page logged as errors since the last call."""
        entries = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _wait_for_driver(self) -> None:
        def ready() -> bool:
            try:
                return self._ask("GET", "/status", None)["ready"]
            except OSError:
                return False

        until(ready, lambda: "chromedriver does not start")

    def _ask(self, method: str, path: str, body: dict | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        # To this machine: no proxy, whatever the environment says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode(errors='replace')[:400]}") from error
