"""The live page of the job, and the actions that it offers: served by the agent of the first node."""

import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from http import HTTPStatus
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.policy.stragglers import SlowRank
from fastckpt._core.report.report import Report
from fastckpt._core.saver.server import Saver
from fastckpt.errors import FastckptError
from fastckpt_run.rendezvous.node_links import NodeLinks
from fastckpt_run.views import live_view
from fastckpt_run.watch.http_server import LOCAL, Page, Request, Response
from fastckpt_run.watch.job_actions import JobActions
from fastckpt_run.watch.job_view import JobView, JobViews, as_document
from fastckpt_run.watch.node_channel import NodeChannel

logger = logging.getLogger("fastckpt.launcher")

Json = dict[str, Any]

PAGE = "page"
"""The question among agents for the address of their page."""
TOKEN = "x-fastckpt-token"
"""The header of requests for actions, in lower case."""
REFUSED = "live.refused"
"""The name under which refused actions are counted."""
_ANSWER = 2.0
"""Seconds that the first node has to report the address of its page."""
_HTML, _JSON = "text/html; charset=utf-8", "application/json"
_LOOPBACK = frozenset({LOCAL, "localhost", "::1"})


class LivePage:
    """The page of the job on its first node; on others, where that is.

    Args:
        channel: Asks the agents of other nodes.
        saver: Has the reports and saves of the workers.
        actions: Carries out requests with the token.
        lines: Events of this launch so far.
        slow: The slow ranks of now, by rank.
        links: Reports of nodes on the links between them; None if the rendezvous of the job has none.

    Attributes:
        pages: Pages for an `HttpServer`, by method and path.
        token: Token that an action needs; not to be shown to users who may only read.
    """

    def __init__(
        self,
        channel: NodeChannel,
        saver: Saver,
        actions: JobActions,
        lines: Sequence[bytes],
        slow: Callable[[], Mapping[int, SlowRank]] = dict,
        links: NodeLinks | None = None,
    ) -> None:
        self._channel = channel
        self._views = JobViews(channel, lines, lambda: [each.directory for each in saver.report()], slow, links)
        self._url, self._host = "", LOCAL
        self._refused = False
        self._reported: tuple[Report, dict[str, str]] | None = None
        self.token = secrets.token_urlsafe(18)
        self.pages: dict[tuple[str, str], Page] = {
            ("GET", "/"): self._page,
            ("GET", "/live"): self._live,
            ("GET", "/status.json"): self._status,
            ("POST", "/flush"): lambda request: self._act(request, actions.flush),
            ("POST", "/drain"): lambda request: self._act(request, lambda: actions.drain(request.body)),
            ("POST", "/stop"): lambda request: self._act(request, actions.stop),
        }
        channel.answer(PAGE, lambda sender, body: {"url": self._url, "host": socket.gethostname()})

    def serve_at(self, host: str, url: str) -> None:
        """Take note of where the page is served, and log it with the token, once."""
        self._host, self._url = host, url
        logger.warning("the live page of the job is %s/#token=%s (of several nodes, node 0 serves it)", url, self.token)

    def rest(self) -> None:
        """Give back memory if nobody looks any more."""
        self._views.rest()

    # --- pages to read

    def _page(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        if self._channel.node != 0:
            return self._elsewhere()
        _, parts = self._parts()
        headers = {"Content-Security-Policy": live_view.policy(), "Cross-Origin-Opener-Policy": "same-origin"}
        return Response(live_view.html(parts).encode(), _HTML, headers=headers)

    def _live(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        if self._channel.node != 0:
            return self._elsewhere(as_html=False)
        document, parts = self._parts()
        return Response(live_view.to_json(parts, document), _JSON)

    def _status(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        if self._channel.node != 0:
            return self._elsewhere(as_html=False)
        return Response(json.dumps(as_document(self._views.look())).encode(), _JSON)

    def _parts(self) -> tuple[Json, dict[str, str]]:
        view = self._views.look()
        document = as_document(view)
        parts = live_view.live_parts(document, view.found) | self._of_report(view)
        return document, {name: parts.get(name, "") for name in live_view.ORDER}

    def _of_report(self, view: JobView) -> dict[str, str]:
        """The parts of the report, which are made once for each."""
        known = self._reported
        if known is None or known[0] is not view.found:
            known = self._reported = view.found, live_view.report_parts(view.found)
        return known[1]

    def _elsewhere(self, *, as_html: bool = True) -> Response:
        try:
            answer = self._channel.ask_first(PAGE, {}, _ANSWER)
        except (FastckptError, OSError) as error:
            answer, why = {}, f", which does not answer: {error}"
        else:
            why = "" if answer.get("url") else ", which serves none: it has no --fast-metrics-port"
        url, host = str(answer.get("url") or ""), str(answer.get("host") or "")
        where = f": {url} on {host}" if url else why
        text = f"This is node {self._channel.node}. The page of the job is that of node 0{where}"
        if not as_html:
            return Response(f"{text}\n".encode(), status=HTTPStatus.MISDIRECTED_REQUEST)
        link = f'<p><a href="{escape(url)}">{escape(url)}</a></p>' if url.startswith("http") else ""
        body = f'<!doctype html>\n<meta charset="utf-8"><title>fastckpt</title><p>{escape(text)}</p>{link}\n'
        headers = {"Content-Security-Policy": "default-src 'none'"}
        return Response(body.encode(), _HTML, HTTPStatus.MISDIRECTED_REQUEST, headers)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that a foreign page makes under a name of its own (DNS rebinding)."""
        # Only on loopback, which has few names; under which names others know this machine is not known here.
        name = request.headers.get("host", LOCAL)
        name = name.rpartition(":")[0] if not name.endswith("]") and ":" in name else name
        if self._host not in _LOOPBACK or name.strip("[]").lower() in _LOOPBACK:
            return None
        text = f"this page is served to this machine alone, as {LOCAL} or localhost, not as {name[:100]}\n"
        return Response(text.encode(), status=HTTPStatus.FORBIDDEN)

    # --- actions

    def _act(self, request: Request, action: Callable[[], Json]) -> Response:
        if refusal := self._refusal(request):
            return refusal
        given = request.headers.get(TOKEN, "").encode(errors="replace")
        # In constant time: the duration must not reveal how much of a guess is right.
        if not hmac.compare_digest(given, self.token.encode()):
            metrics.counts[REFUSED] += 1
            if not self._refused:
                self._refused = True
                logger.warning(
                    "refused an action on the live page: its token is wrong or missing; later refusals are not logged"
                )
            return Response(b"the token is wrong or missing\n", status=HTTPStatus.FORBIDDEN)
        if self._channel.node != 0:
            return self._elsewhere(as_html=False)
        return Response(json.dumps({**action(), "at": time.time()}).encode(), _JSON)
