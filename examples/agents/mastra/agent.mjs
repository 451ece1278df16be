// An agent of Mastra as it is trained. Install it, then train it:
//   npm install @mastra/core zod
//   agl train --agent "node agent.mjs" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import { readFileSync } from "node:fs";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const POPULATION = { Oslo: "717710", Bergen: "291940", Bodø: "53712" };
const population = createTool({
  id: "population",
  description: "How many people live in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async (input) => POPULATION[(input.context ?? input).city] ?? "error: no such city",
});
const agent = new Agent({
  id: "clerk",
  name: "clerk",
  instructions: "You look numbers up.",
  model: {
    id: `openai/${process.env.AGL_MODEL}`,
    url: process.env.OPENAI_BASE_URL,
    apiKey: process.env.OPENAI_API_KEY,
  },
  tools: { population },
});
const task = JSON.parse(readFileSync(process.env.AGL_TASK, "utf8"));
const { text } = await agent.generate(task.question, { maxSteps: 4 });
console.log(JSON.stringify({ reward: text.includes(task.answer) ? 1 : 0 }));
process.exit(0);
