// The player: a radix tree and its KV pool, step by step.  Plain ES module, no dependency, no network.
//
//   Story    the steps, and the state at one position; moves by applying steps, goes back from checkpoints
//   layout   which nodes are shown, and where (the same rules as visual_layout.py)
//   View     the DOM: tree, pool, curves, controls; animates from one layout to the next
//   player   what a notebook (anywidget) or a page calls
//
// The data is described in visual_data.py.

const CHECKPOINT = 64;
const CHAR = 6.65, PILL = 24, PILL_WIDTH = [62, 250], TAIL = 44, LEFT = 44;
const GLYPH = { new: "+", hit: "•", evicted: "×", split: "÷", "": "" };
const WORD = { new: "new", hit: "accessed", evicted: "evicted", split: "split", "": "cached" };
const SVG = "http://www.w3.org/2000/svg";
const PACE = 1100; // milliseconds from step to step at speed 1

// ---------------------------------------------------------------------------------------------------------- story

class Story {
  constructor(data) {
    this.capacity = data.capacity;
    this.isStory = data.story;
    this.maxNodes = data.max_nodes;
    this.steps = [data.start.step, ...data.steps];
    this.state = { nodes: new Map(), used: new Uint8Array((data.capacity || 0) + 1) };
    this.highest = 0; // highest slot that was ever used
    for (const node of data.start.nodes) this.put(node);
    for (const [first, count] of data.start.used) this.mark(first, count, 1);
    this.position = 0;
    this.checkpoints = [this.copy()];
    this.requests = new Map(); // request -> positions
    this.steps.forEach((step, i) => this.index(step, i));
  }

  copy() {
    return { nodes: new Map(this.state.nodes), used: this.state.used.slice() };
  }

  index(step, i) {
    for (const rid of step.r || []) {
      if (!this.requests.has(rid)) this.requests.set(rid, []);
      this.requests.get(rid).push(i);
    }
  }

  append(from, steps) { // returns whether they fit on
    if (from > this.steps.length) return false;
    for (const step of steps.slice(this.steps.length - from)) {
      this.index(step, this.steps.length);
      this.steps.push(step);
    }
    return true;
  }

  node(data) {
    const [id, parent, length, label, ids, slots, locks, last, hits, rank] = data;
    return { id, parent, length, label, ids, slots, locks, last, hits, rank };
  }

  put(data) {
    const nodes = this.state.nodes;
    if (data.length > 4) {
      const node = this.node(data);
      for (let i = 0; i < node.slots.length; i += 2) this.highest = Math.max(this.highest, node.slots[i] + node.slots[i + 1] - 1);
      nodes.set(data[0], node);
    } else {
      const [id, locks, last, hits] = data;
      nodes.set(id, { ...nodes.get(id), locks, last, hits });
    }
  }

  mark(first, count, taken) {
    const end = first + count;
    if (end > this.state.used.length) {
      const grown = new Uint8Array(end * 2);
      grown.set(this.state.used);
      this.state.used = grown;
    }
    this.state.used.fill(taken, first, end);
    this.highest = Math.max(this.highest, end - 1);
  }

  apply(step) {
    for (const node of step.g || []) this.state.nodes.delete(node[0]);
    for (const node of step.c || []) this.put(node);
    for (const [first, count, taken] of step.p || []) this.mark(first, count, taken);
  }

  seek(position) {
    position = Math.max(0, Math.min(position, this.steps.length - 1));
    const at = Math.floor(position / CHECKPOINT);
    if (position < this.position || at * CHECKPOINT > this.position + CHECKPOINT) {
      const k = Math.min(at, this.checkpoints.length - 1);
      const stored = this.checkpoints[k];
      this.state = { nodes: new Map(stored.nodes), used: stored.used.slice() };
      this.position = k * CHECKPOINT;
    }
    while (this.position < position) {
      this.apply(this.steps[++this.position]);
      if (this.position % CHECKPOINT === 0 && this.position / CHECKPOINT === this.checkpoints.length)
        this.checkpoints.push(this.copy());
    }
  }

  get step() { return this.steps[this.position]; }

  marks() { // id -> new, hit, split, evicted
    const marks = new Map(), step = this.step;
    for (const pair of step.x || []) for (const id of pair) marks.set(id, "split");
    for (const id of step.h || []) marks.set(id, "hit");
    for (const id of step.n || []) marks.set(id, "new");
    for (const node of step.g || []) marks.set(node[0], "evicted");
    return marks;
  }

  owners() { // of slots 1, 2, ...: 0 free, 1 tree, 2 locked, 3 running
    const used = this.state.used;
    const owners = new Uint8Array(Math.max(this.highest, this.capacity || 0, used.length - 1) + 1);
    for (let i = 1; i < used.length; i++) if (used[i]) owners[i] = 3;
    for (const node of this.state.nodes.values())
      for (let i = 0; i < node.slots.length; i += 2)
        owners.fill(node.locks ? 2 : 1, node.slots[i], node.slots[i] + node.slots[i + 1]);
    return owners;
  }
}

// --------------------------------------------------------------------------------------------------------- layout

function choose(story, marks, folded) {
  const nodes = new Map(story.state.nodes);
  for (const data of story.step.g || []) nodes.set(data[0], story.node(data));
  const wanted = new Set();
  for (let id of marks.keys())
    for (; nodes.has(id) && !wanted.has(id); id = nodes.get(id).parent) wanted.add(id);
  const depths = new Map();
  const depth = (start) => {
    const chain = [];
    let id = start;
    for (; nodes.has(id) && !depths.has(id); id = nodes.get(id).parent) chain.push(id);
    let d = depths.has(id) ? depths.get(id) : -1;
    while (chain.length) depths.set(chain.pop(), ++d);
    return depths.get(start);
  };
  for (const id of nodes.keys()) depth(id);
  const order = [...nodes.values()].sort((a, b) =>
    wanted.has(b.id) - wanted.has(a.id) || b.last - a.last || depths.get(a.id) - depths.get(b.id) || a.id - b.id);
  const kept = order.slice(0, story.maxNodes).sort((a, b) => depths.get(a.id) - depths.get(b.id));
  const boxes = new Map();
  for (const node of kept)
    if ((boxes.has(node.parent) || !nodes.has(node.parent)) && !folded.has(node.parent))
      boxes.set(node.id, { node, depth: depths.get(node.id), mark: marks.get(node.id) || "", hidden: 0, hiddenTokens: 0 });
  const standIn = new Map();
  const root = { hidden: 0, hiddenTokens: 0 };
  for (const node of [...nodes.values()].sort((a, b) => depths.get(a.id) - depths.get(b.id))) {
    if (boxes.has(node.id)) continue;
    const at = boxes.has(node.parent) ? node.parent : nodes.has(node.parent) ? standIn.get(node.parent) : 0;
    standIn.set(node.id, at);
    const box = boxes.get(at) || root;
    box.hidden += 1;
    box.hiddenTokens += node.length;
  }
  return { boxes, root };
}

function place({ boxes, root }, labels, width) {
  const children = new Map();
  for (const box of [...boxes.values()].sort((a, b) => a.node.rank - b.node.rank || a.node.id - b.node.id)) {
    const parent = boxes.has(box.node.parent) ? box.node.parent : 0;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(box);
  }
  let leaves = 0, folds = false;
  for (const [id, box] of boxes) {
    leaves += !children.has(id) + (box.hidden > 0);
    folds = folds || box.hidden > 0;
  }
  const row = leaves <= 24 ? 42 : 30;
  let at = 22;
  const stack = [[0, false]];
  while (stack.length) {
    const [id, done] = stack.pop(), below = children.get(id) || [];
    if (!done) {
      stack.push([id, true]);
      for (let i = below.length - 1; i >= 0; i--) stack.push([below[i].node.id, false]);
      continue;
    }
    const box = id ? boxes.get(id) : root, lines = below.map((child) => child.y);
    if (box.hidden || !below.length) {
      lines.push(at);
      box.stubY = at;
      at += row;
    }
    box.y = (lines[0] + lines[lines.length - 1]) / 2;
  }
  const wanted = [];
  for (const [id, box] of boxes) {
    box.w = Math.max(labels.get(id).length * CHAR + 28, 44);
    wanted[box.depth] = Math.max(wanted[box.depth] || PILL_WIDTH[0], Math.min(box.w, PILL_WIDTH[1]));
  }
  const fold = folds ? 90 : 0, room = width - LEFT - fold - TAIL * wanted.length + 22;
  let limit = PILL_WIDTH[1];
  const total = () => wanted.reduce((sum, w) => sum + Math.min(w, limit), 0);
  while (total() > room && limit > PILL_WIDTH[0]) limit -= 4;
  const columns = wanted.map((w) => Math.min(w, limit)), starts = [];
  columns.reduce((x, w, i) => ((starts[i] = x), x + w + TAIL), LEFT);
  for (const box of boxes.values()) {
    box.x = starts[box.depth];
    box.w = Math.min(box.w, columns[box.depth]);
  }
  const used = LEFT + columns.reduce((sum, w) => sum + w + TAIL, 0) - 22 + fold;
  return { boxes, root, row, width: Math.max(used, 120), height: Math.max(at - row + 28, 60) };
}

// ----------------------------------------------------------------------------------------------------- small tools

function make(name, attributes = {}, ...content) {
  const svg = ["svg", "g", "path", "rect", "circle", "text", "title", "polyline"].includes(name);
  const element = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...content);
  return element;
}

const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

function cut(text, most) {
  if (text.length <= most) return text;
  const tail = most >= 20 ? Math.floor(most / 3) : 0;
  return text.slice(0, Math.max(most - tail - 1, 1)) + "…" + text.slice(text.length - tail);
}

function ranges(slots) {
  const parts = [];
  for (let i = 0; i < slots.length; i += 2)
    parts.push(slots[i + 1] > 1 ? `${slots[i]}–${slots[i] + slots[i + 1] - 1}` : `${slots[i]}`);
  return parts.length > 12 ? [...parts.slice(0, 12), "…"].join(", ") : parts.join(", ");
}

const ICON = {
  first: "M2.5 3v10M8 3L4.5 8L8 13zM13.5 3L10 8L13.5 13z", last: "M13.5 3v10M8 3L11.5 8L8 13zM2.5 3L6 8L2.5 13z",
  back: "M12.5 3v10M9.5 3L3 8L9.5 13z", forward: "M3.5 3v10M6.5 3L13 8L6.5 13z",
  play: "M4.5 2.5L13 8L4.5 13.5z", pause: "M4 3h2.6v10h-2.6zM9.4 3h2.6v10h-2.6z",
};

function icon(name) {
  return make("svg", { viewBox: "0 0 16 16", width: 14, height: 14, class: "mv-icon", "aria-hidden": "true" }, make("path", { d: ICON[name] }));
}

const LOCK = "M2.2 4.5v-1.6a2.3 2.3 0 0 1 4.6 0v1.6M1 4.4h7v5.2h-7z";

// ----------------------------------------------------------------------------------------------------------- view

class View {
  constructor(element, story, options = {}) {
    this.story = story;
    this.options = options; // moved(position), paused(playing): tell a notebook
    this.folded = new Set();
    this.selected = null;
    this.ids = false;
    this.zoom = 1;
    this.speed = 1;
    this.playing = false;
    this.live = Boolean(options.live);
    this.following = this.live;
    this.items = new Map(); // node id -> its elements and where they are now
    this.timer = this.frame = this.waiting = 0;
    this.build(element);
    this.observer = new ResizeObserver(() => {
      const width = this.tree.clientWidth;
      if (width && Math.abs(width - this.lastWidth) > 4) this.draw(false);
    });
    this.observer.observe(this.tree);
    this.show(options.at === undefined || options.at < 0 ? story.steps.length - 1 : options.at, false);
  }

  // ---- the page

  build(element) {
    const button = (text, label, action, key = "") => {
      const made = make("button", { type: "button", "aria-label": label, title: key ? `${label} (${key})` : label });
      made.append(ICON[text] ? icon(text) : text);
      made.addEventListener("click", action);
      return made;
    };
    this.root = make("div", { class: "mv", tabindex: "0", role: "group", "aria-label": "Radix tree player" });
    this.title = make("div", { class: "mv-title" });
    this.svg = make("svg", { class: "mv-svg", role: "img" });
    this.edges = make("g", { fill: "none" });
    this.nodes = make("g");
    this.rootDot = make("circle", { r: 6, cx: 19, class: "mv-root" });
    this.svg.append(this.edges, this.rootDot, this.nodes);
    this.tree = make("div", { class: "mv-tree" }, this.svg);
    this.pool = make("svg", { class: "mv-pool", role: "img" });
    this.poolNote = make("div", { class: "mv-note" });
    this.curves = make("svg", { class: "mv-curves", role: "img", viewBox: "0 0 220 64" });
    this.figures = make("div", { class: "mv-note mv-figures" });
    const owners = make("div", { class: "mv-owners" });
    for (const [name, word] of [["free", "free"], ["tree", "in the tree"], ["locked", "locked"], ["running", "held by a request"]])
      owners.append(make("span", { class: `mv-owner mv-owner-${name}` }, word));
    const side = make("div", { class: "mv-side" },
      make("div", { class: "mv-heading" }, "KV pool"), this.pool, this.poolNote, owners, this.curves, this.figures);
    this.detail = make("div", { class: "mv-detail" });
    this.playButton = button("play", "Play", () => this.toggle(), "space");
    this.slider = make("input", { type: "range", min: "0", value: "0", "aria-label": "Step" });
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.count = make("output", { class: "mv-count" });
    this.speedBox = make("select", { "aria-label": "Speed", title: "Speed" });
    for (const s of [0.5, 1, 2, 4, 8, 16]) this.speedBox.append(make("option", { value: s }, `${s}×`));
    this.speedBox.value = "1";
    this.speedBox.addEventListener("change", () => (this.speed = Number(this.speedBox.value)));
    this.requestBox = make("select", { "aria-label": "Jump to a request", title: "Jump to the next step of a request" });
    this.requestBox.append(make("option", { value: "" }, "request…"));
    this.requestBox.addEventListener("focus", () => this.listRequests());
    this.requestBox.addEventListener("change", () => {
      this.jump(this.requestBox.value);
      this.requestBox.value = "";
    });
    this.liveButton = button("● live", "Follow the engine", () => this.follow(), "l");
    this.liveButton.classList.add("mv-live");
    this.idsButton = button("ids", "Token ids instead of text", () => this.showIds(), "i");
    this.idsButton.setAttribute("aria-pressed", "false");
    const bar = make("div", { class: "mv-bar", role: "toolbar", "aria-label": "Playback" },
      button("first", "First step", () => this.go(0), "home"), button("back", "Step back", () => this.go(this.at - 1), "←"),
      this.playButton, button("forward", "Step forward", () => this.go(this.at + 1), "→"),
      button("last", "Last step", () => this.go(this.last), "end"),
      this.slider, this.count, this.speedBox, this.liveButton, this.requestBox, this.idsButton,
      button("−", "Zoom out", () => this.scale(0.8), "-"), button("+", "Zoom in", () => this.scale(1.25), "+"));
    this.log = make("ol", { class: "mv-log", "aria-label": "Steps" });
    this.spoken = make("div", { class: "mv-spoken", "aria-live": "polite" });
    const legend = make("div", { class: "mv-legend" });
    for (const mark of ["new", "hit", "evicted", "split"])
      legend.append(make("span", { class: `mv-key mv-key-${mark}` }, make("b", {}, GLYPH[mark]), WORD[mark]));
    legend.append(make("span", { class: "mv-key" },
      make("svg", { viewBox: "0 0 9 10", width: 9, height: 10, class: "mv-padlock" }, make("path", { d: LOCK })), "locks"));
    this.root.append(this.title, bar, make("div", { class: "mv-main" }, this.tree, side), this.detail, legend, this.log, this.spoken);
    this.root.addEventListener("keydown", (event) => this.key(event));
    element.replaceChildren(this.root);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inControl = ["INPUT", "SELECT"].includes(event.target.tagName);
    const actions = {
      ArrowRight: () => this.go(this.at + 1), ArrowLeft: () => this.go(this.at - 1), Home: () => this.go(0),
      End: () => this.go(this.last), " ": () => this.toggle(), i: () => this.showIds(), l: () => this.follow(),
      "+": () => this.scale(1.25), "-": () => this.scale(0.8), "]": () => this.selectNext(1), "[": () => this.selectNext(-1),
      f: () => this.fold(this.selected),
    };
    if (inControl || (event.target.tagName === "BUTTON" && event.key === " ") || !actions[event.key]) {
      event.stopPropagation(); // a notebook's own shortcuts are not meant
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  }

  // ---- moving

  get at() { return this.story.position; }
  get last() { return this.story.steps.length - 1; }

  go(position) { // somebody moved it by hand
    this.pause();
    this.following = this.live && position >= this.last;
    this.show(position, true);
    this.options.moved?.(this.following ? -1 : this.at);
  }

  show(position, animate) {
    this.story.seek(position);
    this.draw(animate);
  }

  goto(position, playing) { // a notebook's cell moved it
    this.pause();
    this.following = this.live && position >= this.last;
    this.show(position, true);
    if (playing) this.play();
  }

  follow() {
    if (!this.live) return;
    this.go(this.last);
  }

  toggle() { this.playing ? this.pause() : this.play(); }

  play() {
    if (this.playing) return;
    this.playing = true;
    this.following = false;
    this.playState();
    if (this.at >= this.last) this.show(0, false);
    this.tick();
  }

  pause() {
    clearTimeout(this.timer);
    if (!this.playing) return;
    this.playing = false;
    this.playState();
  }

  playState() {
    this.playButton.replaceChildren(icon(this.playing ? "pause" : "play"));
    this.playButton.setAttribute("aria-label", this.playing ? "Pause" : "Play");
    this.options.played?.(this.playing, this.at);
  }

  tick() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (this.at >= this.last) {
        this.pause();
        this.following = this.live;
        return;
      }
      this.show(this.at + 1, true);
      this.options.moved?.(this.at);
      this.tick();
    }, PACE / this.speed);
  }

  jump(rid) {
    const places = this.story.requests.get(rid);
    if (places) this.go(places.find((i) => i > this.at) ?? places[0]);
  }

  grown(live) { // the story has new steps: draw soon, and once for all that come until then
    this.live = live;
    if (this.waiting) return;
    this.waiting = setTimeout(() => {
      this.waiting = 0;
      if (this.following) this.show(this.last, true);
      else this.controls();
    }, 120);
  }

  scale(by) {
    this.zoom = Math.min(Math.max(this.zoom * by, 0.2), 4);
    this.size();
  }

  showIds() {
    this.ids = !this.ids;
    this.idsButton.setAttribute("aria-pressed", String(this.ids));
    this.draw(true);
  }

  fold(id) {
    if (id === null) return;
    this.folded.has(id) ? this.folded.delete(id) : this.folded.add(id);
    this.draw(true);
  }

  select(id) {
    this.selected = this.selected === id ? null : id;
    this.draw(false);
  }

  selectNext(by) {
    const order = [...this.placed.boxes.values()].sort((a, b) => a.y - b.y || a.x - b.x).map((box) => box.node.id);
    if (!order.length) return;
    const i = order.indexOf(this.selected);
    this.selected = order[(i < 0 ? (by > 0 ? 0 : order.length - 1) : i + by + order.length) % order.length];
    this.draw(false);
    this.spoken.textContent = this.detail.textContent;
  }

  // ---- drawing

  label(node) {
    if (!this.ids) return node.label;
    return node.ids.join(" ") + (node.length > node.ids.length ? " …" : "");
  }

  draw(animate) {
    const story = this.story, marks = story.marks();
    const chosen = choose(story, marks, this.folded);
    const labels = new Map([...chosen.boxes].map(([id, box]) => [id, this.label(box.node)]));
    this.lastWidth = this.tree.clientWidth || 600;
    this.placed = place(chosen, labels, this.lastWidth - 10);
    this.size();
    const step = story.step, lit = new Map((step.h || []).map((id, i) => [id, i]));
    for (const id of step.n || []) lit.set(id, lit.size);
    const still = !animate || matchMedia("(prefers-reduced-motion: reduce)").matches;
    const duration = still ? 0 : Math.min(380, (0.7 * PACE) / this.speed);
    const before = new Map([...this.items].map(([id, item]) => [id, item.now]));
    for (const [id, box] of this.placed.boxes) {
      const item = this.items.get(id) || this.item(id);
      const parent = this.placed.boxes.get(box.node.parent);
      const start = before.get(id) || before.get(box.node.parent) || (parent && before.get(parent.node.parent));
      item.from = before.get(id) || { x: start ? start.x + start.w : LEFT, y: start ? start.y : this.placed.root.y, w: box.w, o: 0 };
      item.to = { x: box.x, y: box.y, w: box.w, o: 1 };
      this.dress(item, box, labels.get(id), lit.has(id) ? lit.get(id) : -1);
    }
    for (const [id, item] of this.items)
      if (!this.placed.boxes.has(id)) {
        item.from = item.now;
        item.to = { ...item.now, o: 0 };
        item.leaving = true;
      }
    this.rootStub();
    this.reveal(step);
    this.animate(duration);
    this.drawPool();
    this.drawCurves();
    this.controls();
    this.describe();
  }

  item(id) {
    const item = {
      edge: make("path"), group: make("g", { "data-node": id, class: "mv-node" }), pill: make("rect", { rx: 6, height: PILL, y: -PILL / 2 }),
      hatch: make("path", { class: "mv-hatch" }), glyph: make("text", { class: "mv-glyph", x: 7, y: 4.5 }),
      text: make("text", { class: "mv-text", y: 3.8 }), note: make("text", { class: "mv-small", x: 2, y: PILL / 2 + 10.5 }),
      dot: make("circle", { r: 4.5 }), lock: make("path", { class: "mv-padlock", d: LOCK }), locks: make("text", { class: "mv-small mv-locks" }),
      stub: make("g", { class: "mv-stub" }), title: make("title"), now: null, leaving: false,
    };
    item.group.append(item.title, item.pill, item.hatch, item.glyph, item.text, item.note, item.dot, item.lock, item.locks, item.stub);
    item.group.addEventListener("click", () => this.select(id));
    item.group.addEventListener("dblclick", () => this.fold(id));
    this.edges.append(item.edge);
    this.nodes.append(item.group);
    this.items.set(id, item);
    return item;
  }

  dress(item, box, label, order) { // everything of a node but its place
    const { node, mark, w } = box, left = mark ? 20 : 8;
    item.leaving = false;
    item.box = box;
    item.group.dataset.state = WORD[mark];
    item.group.setAttribute("class", `mv-node mv-is-${mark || "cached"}${node.id === this.selected ? " mv-selected" : ""}`);
    item.glyph.textContent = GLYPH[mark];
    item.text.setAttribute("x", left);
    item.text.textContent = cut(label, Math.max(Math.floor((w - left - 6) / CHAR), 1));
    const words = [`#${node.id}`, plural(node.length, "token"), `last use ${node.last}`];
    item.note.textContent = this.placed.row > 34 ? words.slice(0, w > 140 ? 3 : w > 84 ? 2 : 1).join(" · ") : "";
    item.pill.setAttribute("width", w);
    item.hatch.setAttribute("d", mark === "evicted" ? hatching(w) : "");
    item.dot.setAttribute("cx", w + 14);
    item.lock.setAttribute("transform", `translate(${w + 9.5},-18)`);
    item.lock.style.display = item.locks.style.display = node.locks ? "" : "none";
    item.locks.setAttribute("x", w + 20.5);
    item.locks.setAttribute("y", -9);
    item.locks.textContent = node.locks;
    const locks = node.locks ? `, ${plural(node.locks, "lock")}` : "";
    item.title.textContent = `#${node.id} (${WORD[mark]}${locks}): ${words[1]}, ${words[2]}\n${label}`;
    item.edge.setAttribute("class", `mv-edge mv-is-${mark || "cached"}${order >= 0 ? " mv-lit" : ""}`);
    for (const element of [item.edge, item.group]) element.style.setProperty("--mv-order", Math.max(order, 0));
    item.stub.replaceChildren();
    if (box.hidden) item.stub.append(...stub(w + 19, 0, box.stubY - box.y, box.hidden, box.hiddenTokens));
  }

  reveal(step) { // of a tree that is taller than its frame, the part where something happens
    const marked = [...(step.n || []), ...(step.h || []).slice(-1), ...(step.g || []).map((node) => node[0])];
    const places = marked.map((id) => this.placed.boxes.get(id)).filter(Boolean).map((box) => box.y * this.zoom);
    const { scrollTop, clientHeight } = this.tree;
    if (!places.length || places.some((y) => y > scrollTop + 20 && y < scrollTop + clientHeight - 20)) return;
    this.tree.scrollTop = Math.min(...places) - clientHeight / 2;
  }

  rootStub() {
    this.rootFold?.remove();
    const root = this.placed.root;
    this.rootFold = make("g", { class: "mv-stub" });
    if (root.hidden) this.rootFold.append(...stub(24, root.y, root.stubY, root.hidden, root.hiddenTokens));
    this.nodes.append(this.rootFold);
  }

  animate(duration) {
    cancelAnimationFrame(this.frame);
    const rootFrom = Number(this.rootDot.getAttribute("cy") || this.placed.root.y), begin = performance.now();
    const frame = (now) => {
      const t = duration ? Math.min((now - begin) / duration, 1) : 1, e = t < 0 ? 0 : 1 - (1 - t) ** 3;
      const mix = (a, b) => a + (b - a) * e;
      const rootY = mix(rootFrom, this.placed.root.y);
      this.rootDot.setAttribute("cy", rootY);
      for (const item of this.items.values()) {
        const { from, to } = item;
        item.now = { x: mix(from.x, to.x), y: mix(from.y, to.y), w: mix(from.w, to.w), o: mix(from.o, to.o) };
      }
      for (const [id, item] of this.items) {
        const { x, y, o } = item.now, parent = this.items.get(item.box.node.parent);
        const x0 = parent ? parent.now.x + parent.box.w + 19 : 24, y0 = parent ? parent.now.y : rootY;
        const bend = Math.min(Math.max((x - x0) * 0.5, 8), 40), end = x + item.box.w;
        item.edge.setAttribute("d", `M${x0} ${y0}C${x0 + bend} ${y0} ${x - bend} ${y} ${x} ${y}M${end} ${y}h10`);
        item.group.setAttribute("transform", `translate(${x},${y})`);
        item.edge.style.opacity = item.group.style.opacity = o;
        if (t >= 1 && item.leaving) {
          item.edge.remove();
          item.group.remove();
          this.items.delete(id);
        }
      }
      if (t < 1) this.frame = requestAnimationFrame(frame);
    };
    frame(begin);
  }

  size() {
    const { width, height } = this.placed;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width * this.zoom);
    this.svg.setAttribute("height", height * this.zoom);
  }

  drawPool() {
    const story = this.story, owners = story.owners(), capacity = story.capacity || story.highest;
    let used = Math.max(story.highest, 1);
    const cells = 600, each = Math.max(1, Math.ceil(used / cells));
    const shown = capacity <= cells ? capacity : Math.min(Math.max(used, 40), capacity);
    const count = Math.ceil(shown / each), side = count > 200 ? 10 : 13, columns = Math.floor(220 / side), a = side - 2;
    const shapes = ["", "", "", ""], glyphs = ["", "", "", ""];
    for (let i = 0; i < count; i++) {
      const tally = [0, 0, 0, 0];
      for (let s = i * each + 1; s <= Math.min((i + 1) * each, shown); s++) tally[owners[s]]++;
      tally[0] = 0;
      const most = Math.max(...tally), owner = most ? tally.indexOf(most) : 0;
      const x = (i % columns) * side + 1, y = Math.floor(i / columns) * side + 1;
      shapes[owner] += `M${x} ${y}h${a}v${a}h${-a}z`;
      if (owner === 2) glyphs[2] += `M${x + a / 2 - 1.2} ${y + a / 2}h2.4`;
      if (owner === 3) glyphs[3] += `M${x + 1.5} ${y + a - 1.5}L${x + a - 1.5} ${y + 1.5}`;
    }
    this.pool.setAttribute("viewBox", `0 0 222 ${Math.max(Math.ceil(count / columns), 1) * side + 2}`);
    this.pool.replaceChildren(...["free", "tree", "locked", "running"].flatMap((name, k) => [
      make("path", { class: `mv-slot-${name}`, "data-owner": name, d: shapes[k] }),
      make("path", { class: `mv-glyph-${name}`, d: glyphs[k] })]));
    const step = story.step, share = capacity ? Math.round((100 * step.q[1]) / capacity) : 0;
    this.pool.setAttribute("aria-label", `KV pool: ${step.q[1]} of ${capacity} slots in use, ${step.q[0]} of them in the tree`);
    this.poolNote.textContent = (shown < capacity ? `slots 1 to ${shown.toLocaleString("en")} of ${capacity.toLocaleString("en")}` :
      plural(capacity, "slot")) + (each > 1 ? `, ${each} a cell` : "") + `; ${share} % in use`;
  }

  drawCurves() {
    const { steps, position, capacity } = this.story, n = steps.length;
    const size = capacity || this.story.highest || 1, every = Math.max(1, Math.ceil(n / 300));
    const busy = [], rate = [];
    const x = (i) => (n > 1 ? (220 * i) / (n - 1) : 0), y = (v) => 60 - 56 * Math.min(v, 1);
    for (let i = 0; i < n; i += i + every < n || i === n - 1 ? every : n - 1 - i) {
      const q = steps[i].q;
      busy.push(`${x(i).toFixed(1)},${y(q[1] / size).toFixed(1)}`);
      rate.push(`${x(i).toFixed(1)},${y(q[2] ? q[3] / q[2] : 0).toFixed(1)}`);
    }
    const q = steps[position].q, hit = q[2] ? q[3] / q[2] : 0;
    this.curves.replaceChildren(
      make("path", { class: "mv-grid", d: "M0 4H220M0 32H220" }), make("path", { class: "mv-axis", d: "M0 60H220" }),
      make("polyline", { class: "mv-busy", points: busy.join(" ") }), make("polyline", { class: "mv-rate", points: rate.join(" ") }),
      make("path", { class: "mv-cursor", d: `M${x(position)} 0V60` }));
    const percent = (v) => `${Math.round(100 * v)} %`;
    this.curves.setAttribute("aria-label", `occupancy ${percent(q[1] / size)}, hit rate so far ${percent(hit)}`);
    this.figures.replaceChildren(make("span", { class: "mv-line-busy" }, `occupancy ${percent(q[1] / size)}`),
      make("span", { class: "mv-line-rate" }, `hit rate ${percent(hit)}`));
  }

  controls() {
    const { steps, position, isStory } = this.story, step = steps[position];
    this.title.textContent = isStory ? step.t : `${position}: ${step.t}`;
    this.slider.max = String(this.last);
    this.slider.value = String(position);
    this.slider.setAttribute("aria-valuetext", `${position} of ${this.last}: ${step.t}`);
    this.count.textContent = `${position} / ${this.last}`;
    if (!this.playing || this.speed <= 1) this.spoken.textContent = step.t;
    this.liveButton.style.display = this.live ? "" : "none";
    this.liveButton.setAttribute("aria-pressed", String(this.following));
    this.root.dataset.step = position;
    const first = Math.max(0, Math.min(position - 3, this.last - 5)), lines = [];
    for (let i = first; i <= Math.min(first + 5, this.last); i++) {
      const line = make("button", { type: "button" }, make("span", { class: "mv-number" }, isStory ? "" : String(i)), steps[i].t);
      line.addEventListener("click", () => this.go(i));
      lines.push(make("li", i === position ? { "aria-current": "step" } : {}, line));
    }
    this.log.replaceChildren(...lines);
    this.requestBox.style.display = this.story.requests.size ? "" : "none";
  }

  listRequests() { // when it is opened: a long run has thousands
    this.requestBox.replaceChildren(make("option", { value: "" }, "request…"),
      ...[...this.story.requests.keys()].map((rid) => make("option", { value: rid }, rid)));
  }

  describe() {
    const story = this.story, step = story.step;
    const marked = [...story.marks()].map(([id, mark]) => `#${id} ${WORD[mark]}`).join(", ");
    this.svg.setAttribute("aria-label", `Radix tree, ${plural(story.state.nodes.size, "node")}, ${plural(step.q[0], "token")}. ${marked}`);
    const node = this.selected !== null && this.placed.boxes.get(this.selected)?.node;
    this.detail.replaceChildren();
    if (!node) {
      this.detail.append("Click a node, or press [ and ], to see its tokens; double-click, or press f, to fold what is below it.");
      return;
    }
    const facts = [`#${node.id}`, plural(node.length, "token"), plural(node.locks, "lock"), plural(node.hits, "hit"),
      `last use ${node.last}`, `slots ${ranges(node.slots) || "none"}`];
    this.detail.append(make("b", {}, facts.join(" · ")), make("span", { class: "mv-code" }, node.label),
      make("span", { class: "mv-code" }, node.ids.join(" ") + (node.length > node.ids.length ? " …" : "")));
  }

  close() {
    this.pause();
    clearTimeout(this.waiting);
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
  }
}

function stub(x, y, at, hidden, tokens) {
  return [make("path", { d: `M${x} ${y}C${x + 10} ${y} ${x} ${at} ${x + 12} ${at}` }),
    make("text", { class: "mv-small", x: x + 16, y: at + 3.5 }, `+${plural(hidden, "node")}, ${tokens.toLocaleString("en")} tok`)];
}

function hatching(w) {
  let d = "";
  for (let x = 4; x < w + PILL; x += 8) {
    const x0 = Math.max(x - PILL, 1), x1 = Math.min(x, w - 1);
    if (x1 > x0) d += `M${x0} ${PILL / 2 - Math.max(x0 - (x - PILL), 1)}L${x1} ${-PILL / 2 + Math.max(x - x1, 1)}`;
  }
  return d;
}

// --------------------------------------------------------------------------------------------------------- player

const shared = new WeakMap(); // a notebook's model -> its story and the views that show it

function attach(model) {
  let entry = shared.get(model);
  if (entry) return entry;
  const data = JSON.parse(model.get("data"));
  entry = { data, story: new Story(data), views: new Set(), live: data.live };
  shared.set(model, entry);
  model.on("msg:custom", (message) => {
    if (message.type === "append") {
      entry.live = message.live;
      if (!extend(entry.data, message)) model.send({ type: "have", count: entry.data.steps.length + 1 });
    } else if (message.type === "reset") {
      entry.data = JSON.parse(message.data);
      entry.live = entry.data.live;
    }
    for (const view of entry.views) {
      if (message.type === "goto") {
        view.goto(message.position, message.playing);
        continue;
      }
      if (message.type === "reset") view.story = new Story(entry.data);
      else view.story.append(message.from, message.steps);
      view.grown(entry.live);
    }
  });
  model.send({ type: "have", count: data.steps.length + 1 });
  return entry;
}

function extend(data, message) {
  const count = data.steps.length + 1;
  if (message.from > count) return false;
  data.steps.push(...message.steps.slice(count - message.from));
  return true;
}

const player = {
  initialize({ model }) {
    attach(model);
  },

  render({ model, el }) {
    const entry = attach(model);
    let timer = 0;
    const tell = (changes) => { // at most a few messages a second, however fast it plays
      clearTimeout(timer);
      timer = setTimeout(() => {
        for (const [name, value] of Object.entries(changes)) model.set(name, value);
        model.save_changes();
      }, 150);
    };
    const view = new View(el, new Story(entry.data), {
      at: model.get("position"), live: entry.live,
      moved: (position) => tell({ position }),
      played: (playing, position) => tell({ playing, position }),
    });
    entry.views.add(view);
    model.send({ type: "open" });
    if (model.get("playing")) view.play();
    return () => {
      entry.views.delete(view);
      view.close();
      model.send({ type: "closed" });
    };
  },

  mount(element, data) {
    const view = new View(element, new Story(data), { at: data.at });
    element.view = view;
    return view;
  },
};

export default player;
