// Reading values off the maps, walking through words, settings, saving files. Loaded once; listens on the document.
(() => {
  // what is clicked before the page listens would be lost
  document.documentElement.style.pointerEvents = "none";
  window.whyformerReady = () => {
    document.documentElement.style.pointerEvents = "";
    document.documentElement.dataset.ready = "";
    // the view in the address takes the place of the example
    return new URLSearchParams(location.hash.slice(1)).has("kind") ? empty : { __type__: "update" };
  };

  const close = (selector, node) => (node instanceof Element ? node.closest(selector) : null);
  const round = (v) => (v === 0 ? "0" : Number(v.toPrecision(4)).toString());
  const valuesOf = new WeakMap();

  function values(map) {
    if (!valuesOf.has(map)) {
      const bytes = Uint8Array.from(atob(map.dataset.values), (c) => c.charCodeAt(0));
      valuesOf.set(map, new Float32Array(bytes.buffer));
    }
    return valuesOf.get(map);
  }

  function tell(node, words) {
    const line = (close("figure", node) || close(".wf-sentences", node))?.querySelector(".wf-value");
    if (line) line.textContent = words || "\u00a0";
  }

  // the map may lie on a part of the picture only: left, top, width, height as shares of it
  const box = (map) => (map.dataset.box || "0,0,1,1").split(",").map(Number);

  function point(map, row, column) {
    const rows = Number(map.dataset.rows), columns = Number(map.dataset.columns);
    row = Math.min(rows - 1, Math.max(0, row));
    column = Math.min(columns - 1, Math.max(0, column));
    map.dataset.at = `${row},${column}`;
    const [x, y, w, h] = box(map), cursor = map.querySelector(".wf-cursor");
    cursor.hidden = false;
    cursor.style.left = `${100 * (x + (w * column) / columns)}%`;
    cursor.style.top = `${100 * (y + (h * row) / rows)}%`;
    cursor.style.width = `${(100 * w) / columns}%`;
    cursor.style.height = `${(100 * h) / rows}%`;
    tell(map, `${map.dataset.what} in row ${row}, column ${column}: ${round(values(map)[row * columns + column])}`);
  }

  document.addEventListener("pointermove", (event) => {
    const map = close(".wf-map", event.target);
    if (!map) return;
    const area = map.getBoundingClientRect(), [x, y, w, h] = box(map);
    const across = ((event.clientX - area.left) / area.width - x) / w;
    const down = ((event.clientY - area.top) / area.height - y) / h;
    if (across < 0 || down < 0 || across >= 1 || down >= 1) return;
    point(map, Math.floor(down * map.dataset.rows), Math.floor(across * map.dataset.columns));
  });

  document.addEventListener("pointerout", (event) => {
    const map = close(".wf-map", event.target);
    if (map && !map.contains(event.relatedTarget) && document.activeElement !== map) {
      map.querySelector(".wf-cursor").hidden = true;
      tell(map, "");
    }
  });

  document.addEventListener("focusin", (event) => {
    const map = close(".wf-map", event.target);
    if (map && map.matches(":focus-visible")) {
      const [row, column] = (map.dataset.at || "0,0").split(",").map(Number);
      point(map, row, column);
    }
    const word = close(".wf-word", event.target);
    if (word) tell(word, `${word.textContent}: ${word.dataset.value}`);
  });

  document.addEventListener("pointerover", (event) => {
    const word = close(".wf-word", event.target);
    if (word) tell(word, `${word.textContent}: ${word.dataset.value}`);
  });

  // gradio opens the choice of a file in an empty field alone; dropped on a picture, another one takes its place
  document.addEventListener("click", (event) => {
    const field = close("#wf-picture", event.target);
    if (!field?.querySelector(".image-frame") || !close(".image-frame, .source-selection button:first-child", event.target)) return;
    field.querySelector("input[type=file]").click();
  });

  // gradio names its upload button otherwise than it reads, so that saying what one sees would not find it
  let waiting = false;
  new MutationObserver(() => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      for (const button of document.querySelectorAll("#wf-picture button.upload-container")) {
        const name = `Picture: ${button.innerText.replace(/\s+/g, " ").trim()}`;
        if (button.getAttribute("aria-label") !== name) button.setAttribute("aria-label", name);
      }
    });
  }).observe(document, { childList: true, subtree: true, attributes: true, attributeFilter: ["aria-label"] });

  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  document.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    const map = close(".wf-map", event.target), word = close(".wf-word", event.target);
    if (map && step) {
      event.preventDefault();
      const [row, column] = (map.dataset.at || "0,0").split(",").map(Number);
      const stride = event.shiftKey ? 10 : 1;
      point(map, row + stride * step[0], column + stride * step[1]);
    } else if (word && (step || event.key === "Home" || event.key === "End")) {
      event.preventDefault();
      const all = [...word.parentElement.querySelectorAll(".wf-word")], here = all.indexOf(word);
      const mirrored = getComputedStyle(word.parentElement).direction === "rtl" && step && step[1] ? -1 : 1;
      const to = step ? here + mirrored * (step[0] + step[1]) : event.key === "Home" ? 0 : all.length - 1;
      const next = all[Math.min(all.length - 1, Math.max(0, to))];
      word.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  });

  document.addEventListener("input", (event) => {
    const shown = event.target.type === "range" ? event.target.parentElement.querySelector("output") : null;
    if (shown && close(".wf-form", event.target)) shown.textContent = event.target.value;
  });

  document.addEventListener("click", async (event) => {
    const button = close(".wf-copy", event.target);
    if (!button) return;
    const code = button.parentElement.nextElementSibling.textContent;
    try {
      await navigator.clipboard.writeText(code);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(button.parentElement.nextElementSibling);
      button.textContent = "selected: press Ctrl+C";
    }
    setTimeout(() => (button.textContent = "copy"), 2000);
  });

  // method -> setting -> value, as JSON, from whatever fields the form now has
  window.whyformerSettings = () => {
    const found = {};
    for (const field of document.querySelectorAll(".wf-form [data-key]")) {
      const { method, key, part } = field.dataset;
      const own = (found[method] ??= {});
      let value = field.value;
      if (field.type === "checkbox") value = field.checked;
      else if (field.type === "number" || field.type === "range") value = field.value === "" ? null : Number(field.value);
      else if (field.tagName === "SELECT") value = JSON.parse(field.value);
      else if ("json" in field.dataset) {
        try {
          value = field.value.trim() === "" || field.value.trim() === "none" ? null : JSON.parse(field.value);
        } catch {
          value = field.value;
        }
      }
      if (part === undefined) own[key] = value;
      else {
        own[key] ??= null;
        if (value !== null) own[key] = { ...own[key], [part]: value };
      }
    }
    return JSON.stringify(found);
  };

  window.whyformerSave = (file) => {
    if (!file || !file.base64) return [];
    const bytes = Uint8Array.from(atob(file.base64), (c) => c.charCodeAt(0));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes], { type: file.mime }));
    link.download = file.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    return [];
  };

  let asked = false;
  // the bars of the likeliest classes: pressed is what is explained, without a choice the first; the last one stays
  const bars = () => [...document.querySelectorAll(".wf-class")];
  window.whyformerPress = (chosen) => {
    const pressed = chosen?.length ? chosen : bars().slice(0, 1).map((bar) => bar.dataset.class);
    for (const bar of bars()) bar.setAttribute("aria-pressed", pressed.includes(bar.dataset.class));
    return [];
  };
  window.whyformerToggle = (bar) => {
    const pressed = bars().filter((one) => (one.getAttribute("aria-pressed") === "true") !== (one === bar));
    asked = true;
    return (pressed.length ? pressed : [bar]).map((one) => one.dataset.class);
  };
  // a new input has a number and clears the result; so does another model, but not a list that is left as it was
  const empty = '<p class="wf-empty">The maps appear here.</p>';
  const model = () => document.querySelector("#wf-model input")?.value;
  let before = null;
  document.addEventListener("focusin", (event) => close("#wf-model", event.target) && (before = model()), true);
  let number = 0;
  window.whyformerNumber = () => number;
  window.whyformerClear = () => (number++, [empty, ""]);
  const unchanged = [{ __type__: "update" }, { __type__: "update" }];
  window.whyformerModel = () => {
    if (model() === before) return unchanged;
    before = model();
    return window.whyformerClear();
  };
  // text that the visitor enters clears the result, and that of an example does not
  let edited = false;
  document.addEventListener("input", (event) => close("#wf-sentence, #wf-pair, #wf-target", event.target) && (edited = true), true);
  window.whyformerText = () => {
    if (!edited) return unchanged;
    edited = false;
    return window.whyformerClear();
  };
  window.whyformerWaiting = '<p class="wf-status wf-busy" role="status">Waiting for the model …</p>';

  // where the maps stand below the controls, as on a phone, the first of them comes into sight
  document.addEventListener("click", (event) => (asked ||= !!close("#wf-explain", event.target)));
  new MutationObserver(() => {
    const board = document.querySelector("#wf-board");
    if (!asked || !board?.querySelector(".wf-map, .wf-word, .wf-generated")) return;
    asked = false;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (board.getBoundingClientRect().top > innerHeight * 0.7) board.scrollIntoView({ behavior: calm ? "auto" : "smooth" });
  }).observe(document, { childList: true, subtree: true });

  // behind the # of the address, so that a reload shows the view again; no server is sent it
  window.whyformerAddress = (view) => {
    history.replaceState(null, "", view ? `#${view}` : location.pathname + location.search);
    return [];
  };

  // when the server goes, the page says so; one that was started again knows nothing of this page
  const ask = () => fetch("gradio_api/app_id", { cache: "no-store" }).then((answer) => answer.json()).then((found) => found.app_id);
  let server = null, missed = 0;
  const say = (words, again) => {
    let line = document.querySelector(".wf-gone");
    if (!words) return line?.remove();
    if (!line) {
      line = document.body.appendChild(document.createElement("p"));
      line.className = "wf-gone";
      line.setAttribute("role", "alert");
    }
    if (line.dataset.words === words) return;
    line.dataset.words = line.textContent = words;
    if (again) {
      const link = line.appendChild(document.createElement("a"));
      link.href = "";
      link.textContent = "Reload the page.";
      link.addEventListener("click", (event) => (event.preventDefault(), location.reload()));
    }
  };
  const watch = async () => {
    try {
      const found = await ask();
      server ??= found;
      missed = 0;
      say(found === server ? "" : "The server was started again and has forgotten this page. ", found !== server);
    } catch {
      if (++missed > 1) say("The server of this page is gone: what is shown stays, nothing new can be asked.", false);
    }
    setTimeout(watch, 3000);
  };
  watch();
})();
