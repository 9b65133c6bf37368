// openai for Node against a server: node client.mjs BASE_URL SCENARIO. Exits non-zero, saying why,
// where something is not as the package's users expect it.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, scenario] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "-", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const tools = [
  {
    type: "function",
    function: {
      name: "Trip",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const scenarios = {
  async chat() {
    const reply = await client.chat.completions.create({ model: "fake", messages });
    assert.equal(reply.choices[0].message.content, "héllo 😀");
    assert.equal(reply.choices[0].finish_reason, "stop");
    assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
    assert.ok(reply._request_id);
    assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["fake"]);
  },

  async stream() {
    const chunks = await all(
      await client.chat.completions.create({
        model: "fake",
        messages,
        stream: true,
        stream_options: { include_usage: true },
      }),
    );
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    assert.equal(text, "héllo 😀");
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.ok(chunks.at(-1).usage.completion_tokens > 0);
    const helper = client.chat.completions.stream({ model: "fake", messages });
    assert.equal(await helper.finalContent(), "héllo 😀");
  },

  async completions() {
    const reply = await client.completions.create({
      model: "fake",
      prompt: [109, 110],
      echo: true,
      logprobs: 1,
      max_tokens: 3,
    });
    const { text, finish_reason, logprobs } = reply.choices[0];
    assert.equal(text, "hihé");
    assert.equal(finish_reason, "length");
    assert.deepEqual(logprobs.tokens.slice(0, 2), ["h", "i"]);
    assert.equal(logprobs.token_logprobs[0], null);
    assert.ok(logprobs.token_logprobs.slice(1).every((value) => value < 0));
    assert.equal(logprobs.top_logprobs.length, logprobs.tokens.length);
  },

  async tools() {
    const asked = { model: "fake", messages, tools, tool_choice: "required" };
    const reply = await client.chat.completions.create(asked);
    assert.equal(reply.choices[0].finish_reason, "tool_calls");
    const [call] = reply.choices[0].message.tool_calls;
    assert.equal(call.function.name, "Trip");
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Oslo" });
    const final = await client.chat.completions.stream(asked).finalChatCompletion();
    assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), {
      city: "Oslo",
    });
    const seen = [];
    const runner = client.chat.completions.runTools({
      model: "fake",
      messages,
      tools: [
        {
          type: "function",
          function: {
            ...tools[0].function,
            parse: JSON.parse,
            function: ({ city }) => {
              seen.push(city);
              return "cold";
            },
          },
        },
      ],
    });
    assert.equal(await runner.finalContent(), "It is cold.");
    assert.deepEqual(seen, ["Oslo"]);
  },

  async errors() {
    const create = (fields) =>
      client.chat.completions.create({ model: "fake", messages, ...fields });
    await assert.rejects(create({ model: "gpt-4" }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError);
      assert.equal(error.code, "model_not_found");
      return true;
    });
    await assert.rejects(create({ functions: [{ name: "f" }] }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "functions");
      return true;
    });
    await assert.rejects(create({ seed: 0 }), (error) => {
      assert.ok(error instanceof OpenAI.RateLimitError);
      assert.equal(error.headers.get("retry-after"), "7");
      return true;
    });
    await assert.rejects(create({ seed: 1 }), (error) => {
      assert.ok(error instanceof OpenAI.InternalServerError);
      assert.equal(error.status, 503);
      return true;
    });
    const stream = await create({ seed: 2, stream: true });
    await assert.rejects(all(stream), OpenAI.APIError);
  },

  async retries() {
    // The package waits for as long as Retry-After says, and asks again.
    const patient = new OpenAI({ baseURL, apiKey: "-", maxRetries: 1 });
    const begin = performance.now();
    const reply = await patient.chat.completions.create({ model: "fake", messages });
    assert.equal(reply.choices[0].message.content, "héllo 😀");
    assert.ok(performance.now() - begin > 900);
  },
};

await scenarios[scenario]();
