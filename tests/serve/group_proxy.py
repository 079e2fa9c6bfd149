"""A proxy as engines of a group see it when they register: LMDeploy's paths, and signatures that are checked."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sagellm.comm_backend.control import check_request
from sagellm.core.errors import PeerError


class GroupProxy:
    """`nodes`: url -> status, of those that have registered. `answer`: (status, document) in place of what it would say."""

    def __init__(self, key: bytes, port: int = 0, answer: tuple[int, object] | None = None) -> None:
        self.key, self.answer = key, answer
        self.nodes: dict[str, dict] = {}
        self.calls: list[str] = []
        self.headers: list[dict[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._serve()

            def do_POST(self):
                self._serve()

            def _serve(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, document = proxy._take(self.command, self.path, body, dict(self.headers))
                content = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _take(self, method, path, body, headers):
        self.calls.append(f"{method} {path}")
        self.headers.append(headers)
        try:
            check_request(self.key, method, path, body, headers)
        except PeerError as error:
            return 401, {"detail": str(error)}
        if self.answer is not None:
            return self.answer
        if path == "/nodes/status":
            return 200, self.nodes
        node = json.loads(body)
        if path == "/nodes/add":
            self.nodes[node["url"]] = node["status"]
            return 200, "Added successfully"
        self.nodes.pop(node["url"], None)
        return 200, "Deleted successfully"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
