// A row of pictures with a slider: what a grammar allows after each character of a text.

function build(element, { frames }) {
  const root = document.createElement("div");
  root.className = "mv mv-page";
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "Pictures, step by step");
  root.innerHTML = '<div class="mv-bar"><button type="button" aria-label="Step back">◀</button>' +
    '<button type="button" aria-label="Step forward">▶</button><input type="range" min="0" aria-label="Step">' +
    '<output class="mv-count"></output></div><div class="mv-frame" aria-live="polite"></div>';
  const [back, forward] = root.querySelectorAll("button");
  const slider = root.querySelector("input"), count = root.querySelector("output"), place = root.querySelector(".mv-frame");
  slider.max = frames.length - 1;
  let at = -1;
  const show = (i) => {
    i = Math.max(0, Math.min(i, frames.length - 1));
    if (i === at) return;
    at = i;
    slider.value = i;
    slider.setAttribute("aria-valuetext", frames[i].title);
    count.textContent = `${i} / ${frames.length - 1}`;
    place.innerHTML = frames[i].svg;
    root.dataset.step = i;
  };
  back.addEventListener("click", () => show(at - 1));
  forward.addEventListener("click", () => show(at + 1));
  slider.addEventListener("input", () => show(Number(slider.value)));
  root.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: frames.length - 1 };
    if (event.target === slider || !(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
  element.replaceChildren(root);
  show(frames.length - 1);
}

const player = { mount: build };

export default player;
