// An agent of LangChain.js as it is trained. Install it, then train it:
//   npm install langchain @langchain/core @langchain/openai zod
//   agl train --agent "node agent.mjs" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import { readFileSync } from "node:fs";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const POPULATION = { Oslo: "717710", Bergen: "291940", Bodø: "53712" };
const population = tool(async ({ city }) => POPULATION[city] ?? "error: no such city", {
  name: "population",
  description: "How many people live in a city.",
  schema: z.object({ city: z.string() }),
});
const agent = createAgent({
  model: new ChatOpenAI({ model: process.env.AGL_MODEL }),
  tools: [population],
});
const task = JSON.parse(readFileSync(process.env.AGL_TASK, "utf8"));
let answer = "";
try {
  const end = await agent.invoke(
    { messages: [{ role: "user", content: task.question }] },
    { recursionLimit: 8 },
  );
  answer = end.messages.at(-1).text;
} catch (error) {
  if (error.name !== "GraphRecursionError") throw error; // in circles: a mistake of the model, not of the agent
}
console.log(JSON.stringify({ reward: answer.includes(task.answer) ? 1 : 0 }));
