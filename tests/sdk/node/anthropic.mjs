// One conversation through the official Anthropic package, streamed and not; prints what was heard as JSON.
import Anthropic from "@anthropic-ai/sdk";
import { readFileSync } from "node:fs";

const { places, question, result, thanks, parameters } = JSON.parse(readFileSync(0, "utf8"));

const clientOf = (place) => new Anthropic({ baseURL: place.anthropic_base_url, apiKey: place.key, maxRetries: 0 });
const of = (message, type) => message.content.filter((block) => block.type === type);

const turn = (message) => ({
  text: of(message, "text").map((block) => block.text).join(""),
  reasoning: of(message, "thinking").map((block) => block.thinking).join(""),
  tools: of(message, "tool_use").map((call) => ({ name: call.name, arguments: call.input })),
});

// The SDK's own loop over tools: its requests continue a thread that the server holds.
async function toolRunner(place, stream) {
  const weather = {
    type: "custom", name: "weather", description: "The weather.", input_schema: parameters,
    run: async () => result, parse: (given) => given,
  };
  const heard = [];
  const runner = clientOf(place).beta.messages.toolRunner({
    model: "policy", max_tokens: 200, thinking: { type: "adaptive" }, stream,
    messages: [{ role: "user", content: question }], tools: [weather],
  });
  for await (const one of runner) heard.push(turn(stream ? await one.finalMessage() : one));
  return heard;
}

async function messages(place, stream) {
  const client = clientOf(place);
  const history = [{ role: "user", content: question }];
  const tools = [{ name: "weather", description: "The weather.", input_schema: parameters }];
  const heard = [];
  for (let i = 0; i < 3; i++) {
    const asked = { model: "policy", max_tokens: 200, thinking: { type: "adaptive" }, messages: history, tools };
    const message = stream
      ? await client.messages.stream(asked).finalMessage()
      : await client.messages.create(asked);
    const calls = of(message, "tool_use");
    heard.push(turn(message));
    history.push({ role: "assistant", content: message.content });
    const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: result }));
    history.push({ role: "user", content: results.length ? results : thanks });
  }
  return heard;
}

const said = {
  "messages whole": await messages(places["messages whole"], false),
  "messages streamed": await messages(places["messages streamed"], true),
  "tool runner whole": await toolRunner(places["tool runner whole"], false),
  "tool runner streamed": await toolRunner(places["tool runner streamed"], true),
};
const client = clientOf(places.errors);
const asked = { model: "policy", messages: [{ role: "user", content: question }] };
const counted = await client.messages.countTokens(asked);
const answered = await client.messages.create({ ...asked, max_tokens: 200 });
said.counted = counted.input_tokens === answered.usage.input_tokens;
try {
  await client.messages.create({ ...asked, max_tokens: 9, container: "c" });
} catch (error) {
  said.error = error.constructor.name;
}
console.log(JSON.stringify(said));
