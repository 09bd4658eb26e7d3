// Makes the calls of a table with OpenAI's Node client: {url, key, calls} on stdin, one list of answers on stdout.

import OpenAI from "openai";
import { text } from "node:stream/consumers";

const { url, key, calls } = JSON.parse(await text(process.stdin));
const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });

async function answer({ method, body }) {
  const path = method.split(".");
  const verb = path.pop();
  const resource = path.reduce((found, name) => found[name], client);
  try {
    const answered = await resource[verb](body);
    if (verb !== "create") return "data" in answered ? { data: answered.data } : answered;
    if (!body.stream) return answered;
    const chunks = [];
    for await (const chunk of answered) chunks.push(chunk);
    return chunks;
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    return { status: error.status, code: error.code, param: error.param };
  }
}

const answers = [];
for (const call of calls) answers.push(await answer(call));
process.stdout.write(JSON.stringify(answers));
