"use strict";
(() => {
  const find = (name) => document.getElementById(name);
  const colours = ["#226cbe", "#de5e0c", "#008c68", "#a0479e", "#b58900", "#00829b", "#c0354a", "#6b6f2a", "#5a55c9", "#8a5a3c", "#3d8b37", "#7a7f87"];
  const blocks = [...document.querySelectorAll("data.block")].map((held) => ({
    heads: Number(held.dataset.heads),
    largest: Number(held.dataset.largest),
    bytes: held.getAttribute("value"),
    shares: null,
  }));
  const from = [...find("from").querySelectorAll("button")], to = [...find("to").querySelectorAll("button")];
  const count = from.length, most = 3000;
  let chosen = null, kept = null;
  const address = new URLSearchParams(location.hash.slice(1));

  function block() {
    const one = blocks[Number(find("block").value)];
    if (!one.shares) {
      const bytes = Uint8Array.from(atob(one.bytes), (c) => c.charCodeAt(0));
      one.shares = new Uint16Array(bytes.buffer);
      one.bytes = "";
    }
    return one;
  }
  const share = (one, head, i, j) => (one.shares[(head * count + i) * count + j] / 65535) * one.largest;
  const heads = () => [...find("heads").querySelectorAll("input:checked")].map((box) => Number(box.value));

  function boxes() {
    const before = new Set(find("heads").querySelector("input") ? heads() : [0]);
    find("heads").querySelectorAll("label").forEach((label) => label.remove());
    for (let head = 0; head < block().heads; head++) {
      const label = find("heads").appendChild(document.createElement("label"));
      const box = label.appendChild(document.createElement("input"));
      box.type = "checkbox";
      box.value = head;
      box.checked = before.has(head);
      const mark = label.appendChild(document.createElement("i"));
      mark.style.background = colours[head % colours.length];
      label.append(String(head));
    }
  }

  function draw() {
    const one = block(), own = heads(), at = kept ?? chosen, lines = [];
    for (const head of own)
      for (let i = 0; i < count; i++)
        for (let j = 0; j < count; j++) {
          if (at && (at.looks ? i !== at.token : j !== at.token)) continue;
          const value = share(one, head, i, j);
          if (value > 0.01 * one.largest) lines.push([value, head, i, j]);
        }
    lines.sort((a, b) => b[0] - a[0]);
    lines.length = Math.min(lines.length, most);
    const svg = find("lines"), area = svg.getBoundingClientRect(), step = area.height / count;
    svg.setAttribute("viewBox", `0 0 ${area.width} ${area.height}`);
    svg.replaceChildren(
      ...lines.reverse().map(([value, head, i, j]) => {
        const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
        const places = { x1: 2, y1: (i + 0.48) * step, x2: area.width - 2, y2: (j + 0.48) * step };
        for (const [name, place] of Object.entries(places)) line.setAttribute(name, place);
        line.setAttribute("stroke", colours[head % colours.length]);
        line.setAttribute("stroke-width", at ? 3 : 2);
        line.setAttribute("stroke-opacity", Math.min(1, value / one.largest).toFixed(3));
        return line;
      }),
    );
    const means = Array.from({ length: count }, (_, k) =>
      !at || !own.length ? 0 : own.reduce((sum, head) => sum + (at.looks ? share(one, head, at.token, k) : share(one, head, k, at.token)), 0) / own.length,
    );
    const top = Math.max(...means) || 1;
    for (const [side, list] of [[true, from], [false, to]])
      list.forEach((button, k) => {
        button.classList.toggle("on", !!at && at.looks === side && at.token === k);
        const strength = at && at.looks !== side ? (60 * means[k]) / top : 0;
        button.style.background = strength > 1 ? `rgb(var(--mattered) / ${strength.toFixed(0)}%)` : "none";
      });
    const say = (value) => ("weighted" in find("view").dataset ? value.toPrecision(3) : `${(100 * value).toFixed(1)} %`);
    const name = (list, k) => `“${list[k].textContent}”`;
    if (!own.length) find("said").textContent = "Choose a head.";
    else if (!at) find("said").textContent = `Block ${find("block").value}, ${own.length === 1 ? "head" : "heads"} ${own.join(", ")}.`;
    else {
      const best = means.map((value, k) => [value, k]).sort((a, b) => b[0] - a[0]).slice(0, 5);
      const rest = best.map(([value, k]) => `${name(to, k)} ${say(value)}`).join(", ");
      const verb = at.looks ? "looks at" : "is looked at by";
      find("said").textContent = `${name(from, at.token)} ${verb} ${rest}${own.length > 1 ? " (mean of the chosen heads)" : ""}.`;
    }
    const view = new URLSearchParams({ block: find("block").value, heads: own.join(",") });
    if (kept) view.set(kept.looks ? "from" : "to", kept.token);
    try {
      history.replaceState(null, "", `#${view}`);
    } catch {
      // a document without an address of its own, as in a frame, keeps none
    }
  }

  for (const [looks, list] of [[true, from], [false, to]])
    list.forEach((button, token) => {
      const point = (on) => () => {
        chosen = on ? { looks, token } : null;
        draw();
      };
      button.addEventListener("pointerenter", point(true));
      button.addEventListener("pointerleave", point(false));
      button.addEventListener("focus", point(true));
      button.addEventListener("blur", point(false));
      button.addEventListener("click", () => {
        kept = kept && kept.looks === looks && kept.token === token ? null : { looks, token };
        draw();
      });
    });
  find("block").addEventListener("change", () => (boxes(), draw()));
  find("heads").addEventListener("change", draw);
  find("all").addEventListener("click", () => (find("heads").querySelectorAll("input").forEach((box) => (box.checked = true)), draw()));
  find("none").addEventListener("click", () => (find("heads").querySelectorAll("input").forEach((box, i) => (box.checked = i === 0)), draw()));
  addEventListener("resize", draw);
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !kept) return;
    kept = null;
    draw();
  });

  const asked = Number(address.get("block"));
  if (address.get("block") !== null && blocks[asked]) find("block").value = asked;
  boxes();
  const listed = address.get("heads")?.split(",");
  if (listed) find("heads").querySelectorAll("input").forEach((box) => (box.checked = listed.includes(box.value)));
  for (const side of ["from", "to"]) {
    const token = Number(address.get(side));
    if (address.get(side) !== null && Number.isInteger(token) && token >= 0 && token < count) kept = { looks: side === "from", token };
  }
  draw();
})();
