// Makes the elements of a row when it is opened. All text goes in as text, never as markup.
"use strict";
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent.trim()),
    (letter) => letter.charCodeAt(0));
  const opened = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(opened).arrayBuffer());
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const { units, rows, count } = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  const planes = [0, 1, 2].map((plane) => bytes.subarray(4 + size + plane * count));
  const unit = (at) => units[planes[0][at] | (planes[1][at] << 8) | (planes[2][at] << 16)];
  let begin = 0;
  for (const row of rows) {
    row.begin = begin;
    for (const [length] of row.segments) begin += length;
  }
  const piece = (tag, style, text) => {
    const element = document.createElement(tag);
    if (style) element.className = style;
    element.textContent = text;
    return element;
  };
  // The text as it is, with a mark at each of its line ends.
  const words = (text) => text.split("\n").flatMap((line, number) =>
    number ? [piece("i", "b", "\n"), line] : [line]);
  const fill = (place, row) => {
    let at = row.begin, token = 0;
    row.segments.forEach(([length, first, runs, tokens, more], number) => {
      const about = `document ${number}: ${tokens.toLocaleString("en")} tokens, from ${token}`;
      place.append(piece("div", "edge", more ? `${about}; ${more}` : about));
      const text = piece("div", "words", "");
      let trained = first, run = 0, left = runs.length ? runs[0] : Infinity, here = token;
      for (const end = at + length; at < end; at++, left--) {
        while (left === 0) [trained, left] = [1 - trained, runs[++run]];
        const [content, ids, special] = unit(at);
        const style = [trained === 1 ? "y" : trained === 0 ? "n" : "", special ? "s" : ""];
        const element = piece("span", style.filter(Boolean).join(" "), "");
        element.append(...words(content));
        element.title = `${ids.join(" ")} at ${here}`;
        here += ids.length;
        text.append(element);
      }
      place.append(text);
      token += tokens;
    });
    if (row.padding) place.append(piece("div", "edge", `${row.padding} padding tokens`));
  };
  const places = [...document.querySelectorAll("details.row")];
  places.forEach((details, number) => {
    const show = () => {
      const place = details.querySelector(".tokens");
      if (details.open && !place.hasChildNodes()) fill(place, rows[number]);
    };
    details.addEventListener("toggle", show);
    show();
  });
  const go = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) {
      target.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", go);
  go();
  document.body.dataset.ready = "yes";
})();
