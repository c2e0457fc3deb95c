// Draws the page's charts and copies its commands. A live page, served while its run continues, is kept up to date.
"use strict";
(() => {
  const drawn = {};
  let updatedAt = new Date();

  // No default tooltip styles: the page's security policy only allows styles of the page.
  const options = (config) => ({
    config, renderer: "svg", actions: false, mode: "vega-lite",
    tooltip: { disableDefaultStyle: true },
  });

  async function draw(page) {
    const { config, charts } = JSON.parse(page.querySelector("#charts").textContent);
    for (const [id, spec] of Object.entries(charts)) {
      const place = document.getElementById(id);
      const text = JSON.stringify(spec);
      if (!place || drawn[id] === text) continue;
      await vegaEmbed(place, spec, options(config));
      drawn[id] = text;
    }
    document.documentElement.dataset.drawn = Object.keys(charts).length;
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    const text = button.parentElement.querySelector("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.parentElement.querySelector("code"));
      button.textContent = "Selected";
    }
  });

  // Replace sections that changed. Charts are redrawn only if their data changed.
  async function update() {
    const status = document.querySelector("#live");
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error(await answer.text());
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      const places = (page) => [...page.querySelectorAll("[data-live]")].map((part) => part.id).join();
      if (places(next) !== places(document)) return location.reload();
      for (const part of document.querySelectorAll("[data-live]")) {
        const other = next.getElementById(part.id);
        const focused = part.contains(document.activeElement) ? document.activeElement : null;
        if (part.innerHTML !== other.innerHTML && (!focused || focused.id)) {
          const open = [...part.querySelectorAll("details")].map((each) => each.open);
          part.replaceChildren(...other.childNodes);
          part.querySelectorAll("details").forEach((each, number) => { each.open = Boolean(open[number]); });
          if (focused) document.getElementById(focused.id)?.focus({ preventScroll: true });
        }
      }
      document.dispatchEvent(new Event("updated"));
      await draw(next);
      updatedAt = new Date();
      status.textContent = `Live: as of ${updatedAt.toLocaleTimeString()}.`;
      status.classList.remove("stale");
    } catch (error) {
      const why = error instanceof TypeError ? "the command that serves this page has ended" : error.message;
      status.textContent = `Not updated since ${updatedAt.toLocaleTimeString()}: ${why}.`.replace(/\s*\.+$/, ".");
      status.classList.add("stale");
    }
  }

  // A hidden page asks for nothing, and at once when it is shown again.
  function keepCurrent(milliseconds) {
    let busy = false, due = Date.now() + milliseconds;
    const check = async () => {
      if (busy || document.hidden || Date.now() < due) return;
      busy = true;
      await update();
      busy = false;
      due = Date.now() + milliseconds;
    };
    setInterval(check, 1000);
    document.addEventListener("visibilitychange", check);
  }

  draw(document).then(() => {
    const status = document.querySelector("#live");
    if (status) keepCurrent(1000 * status.dataset.seconds);
  });
})();
