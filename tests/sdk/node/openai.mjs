// One conversation through each API of the official openai package, streamed and not; prints what was heard as JSON.
import OpenAI from "openai";
import { readFileSync } from "node:fs";

const { places, question, result, thanks, parameters } = JSON.parse(readFileSync(0, "utf8"));
const fn = { name: "weather", description: "The weather.", parameters };

const clientOf = (place) => new OpenAI({ baseURL: place.base_url, apiKey: place.key, maxRetries: 0 });
const turn = (text, reasoning, tools) => ({
  text: text ?? "",
  reasoning: reasoning ?? "",
  tools: tools.map(([name, args]) => ({ name, arguments: JSON.parse(args) })),
});

async function chat(place, stream) {
  const client = clientOf(place);
  const messages = [{ role: "user", content: question }];
  const tools = [{ type: "function", function: fn }];
  const heard = [];
  for (let i = 0; i < 3; i++) {
    const asked = { model: "policy", messages, tools };
    let message;
    let reasoning;
    if (stream) {
      const events = client.chat.completions.stream(asked);
      reasoning = "";
      events.on("chunk", (chunk) => (reasoning += chunk.choices[0]?.delta.reasoning_content ?? ""));
      message = (await events.finalChatCompletion()).choices[0].message;
    } else {
      message = (await client.chat.completions.create(asked)).choices[0].message;
      reasoning = message.reasoning_content;
    }
    const calls = message.tool_calls ?? [];
    heard.push(turn(message.content, reasoning, calls.map((call) => [call.function.name, call.function.arguments])));
    messages.push({ role: "assistant", content: message.content, ...(calls.length ? { tool_calls: calls } : {}) });
    for (const call of calls) messages.push({ role: "tool", tool_call_id: call.id, content: result });
    if (!calls.length) messages.push({ role: "user", content: thanks });
  }
  return heard;
}

async function responses(place, stream, stored) {
  const client = clientOf(place);
  const tools = [{ type: "function", strict: false, ...fn }];
  const history = [{ role: "user", content: question }];
  let fresh = history;
  let previous;
  const heard = [];
  for (let i = 0; i < 3; i++) {
    const asked = { model: "policy", tools, input: stored ? fresh : history };
    if (stored && previous) asked.previous_response_id = previous;
    const response = stream
      ? await client.responses.stream(asked).finalResponse()
      : await client.responses.create(asked);
    previous = response.id;
    const calls = response.output.filter((item) => item.type === "function_call");
    const thoughts = response.output.filter((item) => item.type === "reasoning");
    heard.push(
      turn(
        response.output_text ?? "",
        thoughts.flatMap((item) => item.content).map((part) => part.text).join(""),
        calls.map((call) => [call.name, call.arguments]),
      ),
    );
    history.push(...response.output.map(({ parsed_arguments, ...item }) => item));
    fresh = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: result }));
    if (!calls.length) fresh = [{ role: "user", content: thanks }];
    history.push(...fresh);
  }
  return heard;
}

async function completions(place, stream) {
  const client = clientOf(place);
  let text = "the weather is";
  const heard = [];
  for (let i = 0; i < 2; i++) {
    const asked = { model: "policy", prompt: text, max_tokens: 50 };
    let said = "";
    if (stream) {
      for await (const chunk of await client.completions.create({ ...asked, stream: true }))
        said += chunk.choices[0]?.text ?? "";
    } else said = (await client.completions.create(asked)).choices[0].text;
    heard.push(said);
    text += `${said} And the weather is`;
  }
  return heard;
}

async function errors(place) {
  const asked = { model: "policy", messages: [{ role: "user", content: question }] };
  const seen = [];
  for (const [client, more] of [
    [new OpenAI({ baseURL: place.base_url, apiKey: `sk-agl-${"A".repeat(44)}`, maxRetries: 0 }), {}],
    [clientOf(place), { typical_p: 0.5 }],
  ]) {
    try {
      await client.chat.completions.create({ ...asked, ...more });
      seen.push("none");
    } catch (error) {
      seen.push(error.constructor.name);
    }
  }
  return seen;
}

const said = {};
for (const stream of [false, true]) {
  const how = stream ? "streamed" : "whole";
  said[`chat ${how}`] = await chat(places[`chat ${how}`], stream);
  said[`responses ${how}`] = await responses(places[`responses ${how}`], stream, false);
  said[`responses by id ${how}`] = await responses(places[`responses by id ${how}`], stream, true);
  said[`completions ${how}`] = await completions(places[`completions ${how}`], stream);
}
said.errors = await errors(places.errors);
said.models = (await clientOf(places.errors).models.list()).data.map((model) => model.id);
console.log(JSON.stringify(said));
