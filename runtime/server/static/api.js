// Calls to the server: their API key, errors as sentences, and streams of events.
// The key is kept in sessionStorage: this tab has it until it is closed, and nothing else does.

const KEY = "qserve.key";
const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key");
const why = document.getElementById("key-why");
let asking = null;

// The user was asked for a key and gave none, or the key may not do this: trying again is of no use.
export class NoKey extends Error {}

// The response, if it is one of success; asks for a key as often as the server wants one.
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? options.headers : { ...options.headers, Authorization: `Bearer ${key}` };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status === 403) throw new NoKey(await reason(response));
    if (response.status !== 401) throw new Error(await reason(response));
    // Another call may have got a new key meanwhile.
    if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
  }
}

// The events of a stream. Ends after [DONE]; anything else that ends it is an error.
export async function* events(path, options) {
  const response = await call(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the server ended the connection");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith(":")) continue; // a comment, which keeps the connection
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function askForKey(refused) {
  asking ??= new Promise((resolve, reject) => {
    why.textContent = refused
      ? "The server does not know this key."
      : "This server wants a key. It is kept until this tab is closed.";
    field.value = "";
    dialog.showModal();
    dialog.onclose = () => {
      asking = null;
      if (dialog.returnValue === "given") {
        sessionStorage.setItem(KEY, field.value);
        resolve();
      } else {
        reject(new NoKey("no API key was given"));
      }
      field.value = "";
      dialog.returnValue = "";
    };
  });
  return asking;
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  dialog.close("given");
});
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
