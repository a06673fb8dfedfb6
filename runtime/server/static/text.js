// A model's text as elements: paragraphs, fenced code, inline code and bold. The text only ever becomes text nodes.

// Brings `parent` up to date with `text`; what has not changed since the last call stays as it is.
export function render(parent, text) {
  const blocks = split(text);
  blocks.forEach((block, i) => {
    const old = parent.children[i];
    if (old && old.dataset.kind === block.kind && old.source === block.text) return;
    const made = element(block);
    old ? old.replaceWith(made) : parent.append(made);
  });
  while (parent.children.length > blocks.length) parent.lastElementChild.remove();
}

function split(text) {
  const blocks = [];
  // A fence that is not closed yet runs to the end: it is still being written.
  text.split(/^(```[^\n]*\n[^]*?(?:^```[ \t]*$|(?![^])))/m).forEach((part, i) => {
    if (i % 2) {
      blocks.push({ kind: "code", text: part.replace(/^```[^\n]*\n/, "").replace(/\n?```[ \t]*$/, "") });
    } else {
      for (const paragraph of part.split(/\n\s*\n/)) {
        if (paragraph.trim()) blocks.push({ kind: "text", text: paragraph.replace(/^\n+|\s+$/g, "") });
      }
    }
  });
  return blocks;
}

function element({ kind, text }) {
  const made = document.createElement(kind === "code" ? "pre" : "p");
  made.dataset.kind = kind;
  made.source = text;
  if (kind === "code") {
    made.tabIndex = 0; // it scrolls
    made.append(tagged("code", text));
    return made;
  }
  text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).forEach((part, i) => {
    if (i % 2 === 0) made.append(part);
    else if (part[0] === "`") made.append(tagged("code", part.slice(1, -1)));
    else made.append(tagged("strong", part.slice(2, -2)));
  });
  return made;
}

function tagged(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
