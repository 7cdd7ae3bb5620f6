"use strict";
(() => {
  const INTERVAL = 2000, LIMIT = 10000, LIMIT_OF_DRAIN = 240000, ARMED = 5000, TOKEN = "fastckpt-token";
  const find = (id) => document.getElementById(id);
  const shown = {};
  let seen = Date.now(), misses = 0, timer = 0, acting = false;

  // The token came in the fragment, which no browser sends: it goes back in a header of POSTs alone.
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  let token = "";
  try {
    if (given) {
      sessionStorage.setItem(TOKEN, given);
      history.replaceState(null, "", location.pathname + location.search);
    }
    token = given || sessionStorage.getItem(TOKEN) || "";
  } catch (error) {
    token = given || "";
  }

  function allow(may) {
    find("buttons").hidden = !may;
    find("readonly").hidden = may;
  }

  function replace(part, html) {
    // What somebody marks to copy it stays until it is copied; so does what has the focus.
    const mark = getSelection();
    if (mark && !mark.isCollapsed && part.contains(mark.anchorNode)) return false;
    const places = [...part.querySelectorAll(".table, .events")].map((box) => [box.scrollLeft, box.scrollTop]);
    part.innerHTML = html;
    part.querySelectorAll(".table, .events").forEach((box, at) => {
      if (places[at]) [box.scrollLeft, box.scrollTop] = places[at];
    });
    return true;
  }

  function show(answer) {
    for (const part of document.querySelectorAll("[data-part]")) {
      const html = answer.parts[part.dataset.part];
      if (html !== undefined && html !== shown[part.dataset.part] && replace(part, html)) {
        shown[part.dataset.part] = html;
      }
    }
    document.title = (answer.name ? answer.name + " " : "") + answer.state;
    const colour = { good: "%232b8a57", busy: "%23e0a100", bad: "%23c00024" }[answer.mood];
    document.querySelector("link[rel=icon]").href =
      `data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'><circle cx='4' cy='4' r='4' fill='${colour}'/></svg>`;
  }

  function tick() {
    const age = Math.round((Date.now() - seen) / 1000);
    const text = find("age");
    if (text) text.textContent = age > 0 ? `, ${age} s ago` : "";
    const lost = find("lost");
    if (misses) lost.textContent = `The agent does not answer: the job has ended, or the connection is lost. What is shown is ${age} s old.`;
    lost.hidden = !misses;
    document.body.classList.toggle("stale", misses > 0);
    document.querySelectorAll("#buttons button").forEach((button) => { button.disabled = acting || misses > 0; });
  }

  async function ask(path, options, limit = LIMIT) {
    return fetch(path, { ...options, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(limit) });
  }

  async function update() {
    clearTimeout(timer);
    try {
      const answer = await ask("live");
      if (!answer.ok) throw new Error(String(answer.status));
      show(await answer.json());
      seen = Date.now();
      misses = 0;
    } catch (error) {
      misses += 1;
    }
    tick();
    timer = setTimeout(update, document.hidden ? 5 * INTERVAL : INTERVAL);
  }

  async function act(path, say, body = null, limit = LIMIT) {
    const had = document.activeElement;
    acting = true;
    tick();
    try {
      const answer = await ask(path, { method: "POST", headers: { "X-Fastckpt-Token": token }, body }, limit);
      if (answer.status === 403) {
        find("said").textContent = "The agent refuses this token: open the link that this launch has logged.";
        allow(false);
      } else {
        find("said").textContent = answer.ok ? say(await answer.json()) : `The agent answered ${answer.status}.`;
      }
    } catch (error) {
      find("said").textContent = "The agent does not answer: nothing is known of what became of this.";
    }
    acting = false;
    await update();
    if (had && had.closest("#buttons")) had.focus();
  }

  function flushed(answer) {
    const said = Object.entries(answer.directories).map(([name, one]) =>
      one.outcome === "nothing" ? `Nothing to flush: ${one.why}.`
      : one.outcome === "begun" ? `Step ${one.step} is being persisted.`
      : `Step ${one.step} is on storage, or on its way, already.`);
    return said.join(" ") || "Nothing to flush: no worker has a checkpointer yet.";
  }

  function stopped(answer) {
    const missing = answer.missing.length ? ` Nodes ${answer.missing.join(", ")} do not answer.` : "";
    const refused = Object.values(answer.refused).length ? ` ${Object.values(answer.refused)[0]}.` : "";
    return (answer.nodes.length ? "The job ends, with a flush." : "The job is not stopped.") + missing + refused;
  }

  function drained(answer) {
    if (answer.outcome === "refused") return `${answer.why}.`;
    if (answer.outcome === "known") return `${answer.host} is drained already.`;
    const spare = answer.new.length ? `, with ${answer.new.join(", ")} in its place` : "";
    return `${answer.host} is drained: the job goes on with ${answer.nodes} nodes${spare}.`;
  }

  // What ends something is done when it is pressed twice.
  function twice(button, question, what) {
    const text = button.textContent;
    const rest = () => { button.classList.remove("armed"); button.textContent = text; };
    button.addEventListener("click", () => {
      if (button.classList.contains("armed")) {
        rest();
        what();
        return;
      }
      button.classList.add("armed");
      button.textContent = question;
      setTimeout(rest, ARMED);
    });
  }

  find("flush").addEventListener("click", () => act("flush", flushed));
  twice(find("stop"), "Press again to stop the job", () => act("stop", stopped));
  twice(find("drain"), "Press again to drain it", () =>
    act("drain", drained, JSON.stringify({ host: find("host").value.trim() }), LIMIT_OF_DRAIN));
  allow(Boolean(token));
  document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
  addEventListener("pageshow", update);
  setInterval(tick, 1000);
})();
