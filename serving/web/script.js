// The chat, and the pool as /engine/events tells it. No library, no build step; all text goes in as text.

const $ = (id) => document.getElementById(id);
const make = (tag, name, text) => Object.assign(document.createElement(tag), { className: name ?? "", textContent: text ?? "" });
let wake = () => {}; // ends a sleep early
const sleep = (ms) => new Promise((done) => { wake = done; setTimeout(done, ms); });
const hueOf = (key) => Math.round((key * 137.508 + 170) % 360); // the golden angle: neighbours differ
const MOST_BLOCKS = 4096;
// Longer than two blocks of 64 tokens: the prefix cache finds whole blocks only.
const LESSON = "You are a patient teacher of operating systems. Memory is cut into pages of a fixed size, which lie anywhere and "
  + "are found through a table, so that no space is set aside for what may never come. A program sees one long piece of memory "
  + "from address zero on; the table says where each page of it really lies. Two programs that read the same page can share it, "
  + "and only who writes gets a copy. When there is no room left, pages of one program are put away and brought back later, and "
  + "the program does not notice. A language model's memory of what it has read and written can be kept the same way. The reader "
  + "knows how to program, but has never seen how an operating system works inside. Answer in a few sentences, with one example "
  + "from daily life, and without a list. ";
const TOPICS = ["What is a page table?", "Why not one long piece of memory?", "What is copy-on-write?"];
const MOST_STREAMS = 5; // browsers open six connections to one server, and the pool takes one

// Requests to the server.

async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(options.body && { "Content-Type": "application/json" }) };
  const response = await fetch(path, { ...options, headers });
  $("key-form").hidden = response.status !== 401 && $("key-form").hidden;
  if (response.ok) return response;
  const error = await response.json().catch(() => null);
  throw new Error(error?.error?.message ?? `the server answered ${response.status}`);
}

async function* eventsOf(response) {
  let rest = "";
  for await (const part of pieces(response.body.pipeThrough(new TextDecoderStream()).getReader())) {
    const events = (rest + part).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const field = (name) => event.split("\n").find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      if (field("data") !== undefined) yield [field("event"), field("data")];
    }
  }
}

async function* pieces(reader) {
  try {
    for (let piece; !(piece = await reader.read()).done;) yield piece.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The pool.

const pool = { blockSize: 0, blocks: [], cells: [], requests: new Map(), cursor: -1, picked: null, lit: [] };

function startPool(map) {
  Object.assign(pool, { blockSize: map.block_size, blocks: map.blocks, cursor: -1, lit: [] });
  pool.cells = map.blocks.slice(0, MOST_BLOCKS).map((_, i) => {
    const cell = make("div", "block");
    Object.assign(cell, { id: `block-${i + 1}`, role: "option" });
    return cell;
  });
  $("grid").replaceChildren(...pool.cells);
  document.querySelectorAll(".block-size").forEach((place) => { place.textContent = map.block_size; });
  update({ ...map, changed: map.blocks.map((block, i) => [i + 1, ...block]) });
}

function update({ changed, requests, stats, events }) {
  pool.requests = new Map(requests.map((request) => [request.key, request]));
  events.forEach(showEvent); // before the blocks change: they say what was lost
  for (const [number, ...block] of changed) {
    pool.blocks[number - 1] = block;
    if (number <= pool.cells.length) paint(pool.cells[number - 1], block);
  }
  showStats(stats);
  cards.forEach((card) => card.update());
  if (pool.picked) pick(pool.picked);
  if (pool.cursor >= 0) describe(pool.cursor);
}

function paint(cell, [filled, cached, , keys]) {
  const is = { used: keys.length > 0, cached: !keys.length && Boolean(cached), shared: keys.length > 1 };
  for (const [name, on] of Object.entries(is)) cell.classList.toggle(name, on); // and let animations go on
  cell.textContent = keys.length > 1 ? keys.length : keys.length ? keys[0] % 100 : "";
  cell.style.setProperty("--hue", keys.length ? hueOf(keys[0]) : 0);
  cell.style.setProperty("--fill", `${(100 * filled) / pool.blockSize}%`);
  const colours = [...new Set(keys)].slice(0, 4).map((key) => `hsl(${hueOf(key)} 60% var(--light))`);
  const stripes = colours.map((colour, i) => `${colour} ${(100 * i) / colours.length}% ${(100 * (i + 1)) / colours.length}%`);
  if (colours.length > 1) cell.style.setProperty("--paint", `linear-gradient(100deg, ${stripes})`);
  else cell.style.removeProperty("--paint");
}

function animate(cell, name) {
  if (!cell) return;
  cell.classList.add(name);
  cell.addEventListener("animationend", () => cell.classList.remove(name), { once: true });
}

function showEvent(event) {
  const who = event.key && `request ${event.key}`;
  if (event.kind === "copy") {
    const [from, to] = [pool.cells[event.from - 1], pool.cells[event.to - 1]];
    if (from && to) setTimeout(() => { animate(from, "copied"); animate(to, "copied"); drawArrow(from, to); });
    log(`Copy-on-write: block ${event.from} was copied to ${event.to}`);
  } else if (event.kind === "preempt") {
    const lost = pool.cells.filter((_, i) => pool.blocks[i][3].includes(event.key));
    setTimeout(() => lost.forEach((cell) => animate(cell, "lost")));
    log(`Preempted: ${who} ${event.how === "swap" ? "moved to the host" : "will be computed again"}`);
  } else if (event.kind === "resume") log(`Resumed: ${who}`);
  else if (event.kind === "finish") log(`Ended: ${who}`);
}

function drawArrow(from, to) {
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const middle = (cell) => [cell.offsetLeft + cell.offsetWidth / 2, cell.offsetTop + cell.offsetHeight / 2];
  const [[x1, y1], [x2, y2]] = [middle(from), middle(to)];
  Object.entries({ x1, y1, x2, y2 }).forEach(([name, value]) => line.setAttribute(name, value));
  $("arrows").style.height = `${$("grid").scrollHeight + 8}px`;
  $("arrows").append(line);
  line.addEventListener("animationend", () => line.remove());
}

function log(text) {
  $("log").prepend(make("li", "", text));
  while ($("log").children.length > 5) $("log").lastChild.remove();
}

let summaryTime = 0;

function showStats(stats) {
  const percent = (share) => (share === null ? "-" : `${(100 * share).toFixed(1)} %`);
  const total = pool.blocks.length;
  const tiles = { "blocks in use": `${stats.num_used_blocks} / ${total}`, shared: stats.num_shared_blocks, saved: stats.num_saved_blocks,
    waste: percent(stats.waste), "prefix hits": percent(stats.hit_rate), copies: stats.num_block_copies, preemptions: stats.num_preemptions,
    "run / wait": `${stats.num_running} / ${stats.num_waiting}`, "tokens/s": stats.tokens_per_s };
  $("stats").replaceChildren(...Object.entries(tiles).map(([name, value]) => {
    const tile = make("div");
    tile.append(make("dt", "", name), make("dd", "", value));
    return tile;
  }));
  if (Date.now() - summaryTime < 4000 && stats.num_running) return; // screen readers are not to be flooded
  summaryTime = Date.now();
  const hidden = total > pool.cells.length ? ` The first ${pool.cells.length} of ${total} blocks are shown.` : "";
  $("summary").textContent = `${stats.num_used_blocks} of ${total} blocks of ${pool.blockSize} tokens are in use, ${stats.num_shared_blocks} of them `
    + `shared. ${stats.num_running} requests run, ${stats.num_waiting} wait.${hidden}`;
}

function describe(i) {
  const [filled, cached, position, keys] = pool.blocks[i];
  const holders = keys.map((key) => `request ${key} (${pool.requests.get(key)?.state ?? "ended"})`);
  const text = keys.length ? `${filled} of ${pool.blockSize} slots hold tokens, from position ${position ?? "?"} on. Held by ${holders.join(", ")}.`
    : cached ? "Free. Its tokens can still be found by a prompt that begins the same." : "Free.";
  $("detail").textContent = `Block ${i + 1}: ${text}`;
  pool.cells[i].setAttribute("aria-label", $("detail").textContent);
}

function moveTo(i) {
  if (!pool.cells.length) return;
  pool.cells[pool.cursor]?.classList.remove("cursor");
  pool.cells[pool.cursor]?.removeAttribute("aria-selected");
  pool.cursor = Math.max(0, Math.min(i, pool.cells.length - 1));
  const cell = pool.cells[pool.cursor];
  cell.classList.add("cursor");
  cell.setAttribute("aria-selected", "true");
  cell.scrollIntoView({ block: "nearest" });
  $("grid").setAttribute("aria-activedescendant", cell.id);
  describe(pool.cursor);
}

function pick(card) {
  pool.picked = card;
  const keys = card ? card.keys() : [];
  const table = pool.blocks.map((block, i) => [block[2] ?? 0, i]).filter(([, i]) => pool.blocks[i][3].some((key) => keys.includes(key)));
  table.sort((a, b) => a[0] - b[0]);
  $("grid").classList.toggle("picking", table.length > 0);
  pool.lit.forEach((i) => { pool.cells[i].classList.remove("lit"); paint(pool.cells[i], pool.blocks[i]); });
  pool.lit = table.map(([, i]) => i).filter((i) => i < pool.cells.length);
  table.forEach(([position, i]) => {
    const cell = pool.cells[i];
    if (!cell) return;
    cell.classList.add("lit");
    if (pool.blocks[i][3].length === 1) cell.textContent = Math.floor(position / pool.blockSize) + 1;
  });
  if (keys.length === 1) $("detail").textContent = `Block table of request ${keys[0]}: ${table.map(([, i]) => i + 1).join(", ")}`;
}

async function watchPool() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      for await (const [name, data] of eventsOf(await call("/engine/events"))) {
        wait = 500;
        $("link").textContent = "live";
        $("link").className = "";
        (name === "map" ? startPool : update)(JSON.parse(data));
      }
      $("link").textContent = "the stream ended, trying again";
    } catch (error) {
      $("link").textContent = error instanceof TypeError ? "no connection, trying again" : error.message;
    }
    $("link").className = "off";
    await sleep(wait);
  }
}

// The chat.

const cards = new Set();
let [history, turns] = [[], 0];

class Card {
  constructor(question, onAnswer) {
    this.element = $("card").content.firstElementChild.cloneNode(true);
    const find = (name) => this.element.querySelector(name);
    Object.assign(this, { id: null, texts: [], state: find(".state"), forkButton: find(".fork"), stopButton: find(".stop") });
    Object.assign(this, { control: new AbortController(), onAnswer, question });
    find(".question").textContent = question;
    this.stopButton.onclick = () => this.stop();
    this.forkButton.onclick = () => new Card(`${question} (fork of ${this.keys()[0]})`).run(`/engine/requests/${this.id}/fork`, {});
    for (const name of ["pointerenter", "focusin"]) this.element.addEventListener(name, () => pick(this));
    for (const name of ["pointerleave", "focusout"]) this.element.addEventListener(name, () => pick(null));
    $("none").hidden = true;
    $("cards").prepend(this.element);
    cards.add(this);
    this.say("waiting");
  }

  say(text, failed = false) {
    if (this.state.textContent !== text) this.state.textContent = text;
    this.state.classList.toggle("failed", failed);
  }

  entries() {
    return [...pool.requests.values()].filter((request) => request.id === this.id);
  }

  keys() {
    return this.entries().map((request) => request.key);
  }

  update() {
    const entries = this.entries();
    this.texts.forEach(({ element, tag }, i) => {
      const entry = entries.find((request) => request.index === i);
      element.classList.toggle("alive", Boolean(entry));
      element.style.setProperty("--hue", entry ? hueOf(entry.key) : 0);
      tag.hidden = !entry;
      tag.textContent = entry ? entry.key : "";
    });
    if (!entries.length || this.stopButton.hidden) return;
    const tokens = entries.reduce((sum, request) => sum + request.num_output_tokens, 0);
    const blocks = entries.reduce((sum, request) => sum + request.num_blocks, 0);
    const state = entries.find((request) => request.state !== "running")?.state ?? "running";
    this.say(`${state}, ${tokens} tokens, ${blocks} blocks`);
  }

  write(index, text) {
    while (this.texts.length <= index) {
      const [element, tag, body] = [make("p", "text"), make("span", "tag"), make("span")];
      tag.hidden = true;
      element.append(tag, body);
      this.element.querySelector(".texts").append(element);
      this.texts.push({ element, tag, body });
    }
    this.texts[index].body.append(text);
  }

  async run(path, body) {
    if ([...cards].filter((card) => !card.stopButton.hidden).length > MOST_STREAMS) this.say("waiting for one of the browser's connections");
    try {
      const options = { method: "POST", body: JSON.stringify(body), signal: this.control.signal };
      for await (const [, data] of eventsOf(await call(path, options))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        this.id = chunk.id;
        for (const choice of chunk.choices) this.write(choice.index, choice.delta?.content ?? choice.text ?? "");
        this.forkButton.hidden = this.texts.length > 1;
      }
      this.end("done");
      this.onAnswer?.(this.texts[0]?.body.textContent ?? "");
    } catch (error) {
      if (error.name === "AbortError") this.end("stopped");
      else this.end(error instanceof TypeError ? "the connection was lost" : error.message, true);
    }
  }

  end(text, failed = false) {
    this.stopButton.hidden = this.forkButton.hidden = true;
    this.say(text, failed);
  }

  stop() {
    this.control.abort(); // the server sees the connection end, and aborts the request
  }
}

function ask(question, messages, options = {}, onAnswer = undefined) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const body = { messages, stream: true, temperature: number("temperature"), max_completion_tokens: number("max-tokens"),
    n: number("n"), seed: number("seed"), ...options };
  return new Card(question, onAnswer).run("/v1/chat/completions", body);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("prompt").value;
  const before = [...history, { role: "user", content: question }];
  const turn = ++turns; // of several at a time the one asked last goes on
  ask(question, before, {}, (answer) => { if (turn === turns) history = [...before, { role: "assistant", content: answer }]; });
  $("prompt").value = "";
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("new-chat").onclick = () => {
  [history, turns] = [[], turns + 1];
  for (const card of cards) if (card.stopButton.hidden) { card.element.remove(); cards.delete(card); }
  $("none").hidden = cards.size > 0;
  $("prompt").focus();
};
$("several").onclick = () => {
  const messages = (topic) => [{ role: "system", content: LESSON }, { role: "user", content: topic }];
  TOPICS.forEach((topic) => ask(topic, messages(topic), { n: 1 }));
};
$("samples").onclick = () => {
  const question = $("prompt").value || "Write a short poem about memory.";
  ask(question, [{ role: "user", content: question }], { n: 4, temperature: 1 });
};
$("stop-all").onclick = () => cards.forEach((card) => { if (!card.stopButton.hidden) card.stop(); });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  showModel();
  wake();
});

const STEPS = { ArrowLeft: () => -1, ArrowRight: () => 1, ArrowUp: () => -columns(), ArrowDown: () => columns(), Home: () => -1e9, End: () => 1e9 };
const columns = () => pool.cells.filter((cell) => cell.offsetTop === pool.cells[0].offsetTop).length;
$("grid").addEventListener("keydown", (event) => {
  if (!(event.key in STEPS)) return;
  event.preventDefault();
  moveTo(pool.cursor < 0 ? 0 : pool.cursor + STEPS[event.key]());
});
$("grid").addEventListener("pointerover", (event) => { if (event.target.id.startsWith("block-")) moveTo(pool.cells.indexOf(event.target)); });

async function showModel() {
  try {
    const { data: [model] } = await (await call("/v1/models")).json();
    $("model").textContent = `${model.id}, up to ${model.max_model_len} tokens`;
    $("problem").textContent = "";
  } catch (error) {
    $("problem").textContent = error.message;
  }
}

$("lesson").open = matchMedia("(min-width: 60rem)").matches;
showModel();
watchPool();
