// One conversation through Google's official package, streamed and not; prints what was heard as JSON.
import { GoogleGenAI } from "@google/genai";
import { readFileSync } from "node:fs";

const { places, question, result, thanks, parameters } = JSON.parse(readFileSync(0, "utf8"));

const clientOf = (place, key = place.key) =>
  new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: place.anthropic_base_url } });

async function converse(place, stream) {
  const weather = { name: "weather", description: "The weather.", parametersJsonSchema: parameters };
  const config = {
    tools: [{ functionDeclarations: [weather] }],
    thinkingConfig: { includeThoughts: true },
    maxOutputTokens: 200,
  };
  const chat = clientOf(place).chats.create({ model: "policy", config });
  const heard = [];
  let message = question;
  for (let i = 0; i < 3; i++) {
    const replies = [];
    if (stream) for await (const reply of await chat.sendMessageStream({ message })) replies.push(reply);
    else replies.push(await chat.sendMessage({ message }));
    const parts = replies.flatMap((reply) => reply.candidates[0].content.parts);
    const texts = (thought) => parts.filter((part) => part.text && Boolean(part.thought) === thought);
    const calls = parts.filter((part) => part.functionCall).map((part) => part.functionCall);
    heard.push({
      text: texts(false).map((part) => part.text).join(""),
      reasoning: texts(true).map((part) => part.text).join(""),
      tools: calls.map((call) => ({ name: call.name, arguments: call.args })),
    });
    const results = calls.map(({ id, name }) => ({ functionResponse: { id, name, response: { output: result } } }));
    message = results.length ? results : thanks;
  }
  return heard;
}

async function failure(place) {
  try {
    await clientOf(place, `sk-agl-${"A".repeat(44)}`).models.generateContent({ model: "policy", contents: "hi" });
  } catch (error) {
    return error.status;
  }
  return "none";
}

const models = [];
for await (const model of await clientOf(places.whole).models.list()) models.push(model.name);
const counted = await clientOf(places.whole).models.countTokens({ model: "policy", contents: question });
console.log(
  JSON.stringify({
    whole: await converse(places.whole, false),
    streamed: await converse(places.streamed, true),
    error: await failure(places.whole),
    models,
    counted: counted.totalTokens,
  }),
);
