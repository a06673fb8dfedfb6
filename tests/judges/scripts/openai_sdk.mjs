// The JavaScript SDK: a whole answer, a stream with its usage, an error as its own class, a list of models.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "Count to five." }];
const options = { model, messages, max_tokens: 16, temperature: 0 };

const models = await client.models.list();
assert.deepEqual(models.data.map((each) => each.id), [model]);

const whole = await client.chat.completions.create(options);
assert.equal(whole.choices.length, 1);
assert.ok(["stop", "length"].includes(whole.choices[0].finish_reason));
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...options, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const runner = client.chat.completions.stream(options); // it puts the message together again, and checks the order
assert.equal(await runner.finalContent(), text);

const completion = await client.completions.create({ model, prompt: "One, two,", max_tokens: 4, temperature: 0 });
assert.equal(typeof completion.choices[0].text, "string");

await assert.rejects(
  client.chat.completions.create({ ...options, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(client.chat.completions.create({ ...options, model: "another" }), OpenAI.NotFoundError);
console.log(JSON.stringify({ text, usage }));
