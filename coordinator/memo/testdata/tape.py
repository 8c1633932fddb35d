"""Renders made-up conversations with a real chat template and tokenizer.

Writes a tape: one JSON object a line. The first describes it; each other is one
request:

  conversation  number of the conversation
  keep, add     messages: the conversation's former ones up to keep, then add
  head          the other fields of the body, null: as before
  base, share   token ids: those of request number base up to share, then ids
  ids
  answer        ids of the answer, as the engine would write them
  message       the answer as the client gets it

Texts that begin with @ stand for an entry of the description's texts.
Engines' template environment: trim_blocks, lstrip_blocks, loop controls, tojson
without escapes, strftime_now, raise_exception.
"""

import argparse
import datetime
import glob
import json
import os
import random
import re
import sys

import jinja2.ext
import jinja2.sandbox
import tokenizers


def environment():
    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime(2024, 7, 26).strftime(form)
    return env


def special(config, name):
    v = config.get(name)
    return (v or {}).get("content", "") if isinstance(v, dict) else v or ""


def template_of(args, config):
    if not args.ollama:
        return config["chat_template"]
    text = open(args.ollama, encoding="utf-8").read()
    at = text.index('model: "%s"' % args.model)
    literal = re.search(r'gguf:\s*("(?:[^"\\]|\\.)*")', text[at:]).group(1)
    return json.loads(literal)


def sentences(folder):
    """Natural text: the comments of the Go sources."""
    out = []
    for path in sorted(glob.glob(os.path.join(folder, "**", "*.go"), recursive=True)):
        if path.endswith(".pb.go"):
            continue
        lines = [m.group(1).strip() for m in re.finditer(r"^\s*// (.*)$", open(path, encoding="utf-8").read(), re.M)]
        out += [s.strip() for s in re.split(r"(?<=[.:;])\s", " ".join(lines)) if 20 < len(s) < 400 and "@" not in s]
    return out


class Talk:
    def __init__(self, args):
        self.args, self.rng = args, random.Random(args.seed)
        self.pool = sentences(args.text)
        self.texts = []
        r = self.rng
        self.systems = [self.entry(r.randint(4000, 14000)) for _ in range(args.systems)]
        self.documents = [self.entry(r.randint(6000, 24000)) for _ in range(3)]
        self.tools = [[self.tool(i, k) for k in range(r.randint(1, 4))] for i in range(4)]

    def text(self, size):
        parts, n, r = [], 0, self.rng
        while n < size:
            s = r.choice(self.pool)
            if r.random() < 0.1:
                s = "- " + s + "\n"
            if r.random() < 0.05:
                s = "```go\nfor i := range %d {\n\tx[i] = %d\n}\n```\n" % (r.randint(2, 99), r.randint(0, 9999))
            if r.random() < 0.03:
                s = "Grüße aus Århus, 你好世界, こんにちは, привет. "
            parts.append(s)
            n += len(s) + 1
        return " ".join(parts)[:size].strip()

    def entry(self, size):
        self.texts.append(self.text(size))
        return "@%d" % (len(self.texts) - 1)

    def tool(self, i, k):
        self.rng.random()
        params = {n: {"type": "string", "description": self.text(60)} for n in self.rng.sample(["path", "query", "limit", "city", "unit"], 3)}
        return {"type": "function", "function": {"name": "tool_%d_%d" % (i, k), "description": self.text(120), "parameters": {"type": "object", "properties": params, "required": list(params)[:1]}}}

    def zipf(self, n):
        return min(int(self.rng.paretovariate(1.1)) - 1, n - 1)

    def expand(self, m):
        return {k: self.plain(v) for k, v in m.items()}

    def plain(self, v):
        if isinstance(v, str) and v.startswith("@"):
            number, _, rest = v[1:].partition(" ")
            return self.texts[int(number)] + (" " + rest if rest else "")
        return v


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--name", required=True)
    p.add_argument("--kind", required=True, help="C1, C2 or C3")
    p.add_argument("--license", default="")
    p.add_argument("--tokenizer", required=True, help="folder of tokenizer.json and tokenizer_config.json")
    p.add_argument("--ollama", help="file with templates by model")
    p.add_argument("--model", help="entry of that file")
    p.add_argument("--text", required=True, help="folder of Go sources")
    p.add_argument("--conversations", type=int, default=60)
    p.add_argument("--systems", type=int, default=5)
    p.add_argument("--tools", type=int, default=1)
    p.add_argument("--think", type=int, default=0)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    config = json.load(open(os.path.join(args.tokenizer, "tokenizer_config.json"), encoding="utf-8"))
    tok = tokenizers.Tokenizer.from_file(os.path.join(args.tokenizer, "tokenizer.json"))
    template = environment().from_string(template_of(args, config))
    bos, eos = special(config, "bos_token"), special(config, "eos_token")
    talk = Talk(args)
    r = talk.rng

    def render(head, messages):
        return template.render(messages=messages, tools=head.get("tools"), add_generation_prompt=True, bos_token=bos, eos_token=eos)

    def ids(text):
        return tok.encode(text, add_special_tokens=False).ids

    live, requests, lines = [], [], []
    made = 0
    while made < args.conversations or live:
        if made < args.conversations and (len(live) < 8 or r.random() < 0.25):
            head = {"model": "m"}
            messages = []
            if r.random() < 0.9:
                messages.append({"role": "system", "content": r.choice(talk.systems) if r.random() < 0.2 else talk.systems[talk.zipf(len(talk.systems))]})
            if args.tools and r.random() < 0.33:
                head["tools"] = r.choice(talk.tools)
            first = talk.text(r.randint(20, 1500))
            if r.random() < 0.15:
                first = r.choice(talk.documents) + " " + first
            messages.append({"role": "user", "content": first})
            live.append({"n": made, "head": head, "messages": messages, "kept": 0, "turns": r.randint(2, 11), "reasons": r.random() < 0.3, "told": False})
            made += 1
        c = r.choice(live)
        whole = [talk.expand(m) for m in c["messages"]]
        got = ids(render(c["head"], whole))
        base, share = -1, 0
        # What it shares most with is most often near.
        for k in {c.get("last", -1), *range(max(0, len(requests) - 40), len(requests))} - {-1}:
            other, n = requests[k], 0
            if len(other) <= share or other[share] != got[share] or other[:share] != got[:share]:
                continue
            while n < len(other) and n < len(got) and other[n] == got[n]:
                n += 1
            if n > share:
                base, share = k, n
        c["last"] = len(requests)
        requests.append(got)
        content, thought = talk.text(r.randint(40, 420)), ""
        if args.think and r.random() < 0.5:
            thought = talk.text(r.randint(40, 500))
        written = "<think>\n%s\n</think>\n\n%s" % (thought, content) if thought else content
        message = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        lines.append({
            "conversation": c["n"], "keep": c["kept"], "add": c["messages"][c["kept"]:], "head": None if c["told"] else c["head"],
            "base": base, "share": share, "ids": got[share:], "answer": ids(written + (eos or "")), "message": message,
        })
        c["told"], c["kept"] = True, len(c["messages"])
        c["turns"] -= 1
        if c["turns"] <= 0:
            live.remove(c)
            continue
        if len(c["messages"]) > 2 and r.random() < 0.05:
            at = max(i for i, m in enumerate(c["messages"]) if m["role"] == "user")
            c["kept"] = at
            c["messages"] = c["messages"][:at] + [{"role": "user", "content": talk.text(r.randint(20, 300))}]
            continue
        sent = dict(message)
        if not c["reasons"]:
            sent.pop("reasoning_content", None)
        if "tools" in c["head"] and r.random() < 0.4:
            f = r.choice(c["head"]["tools"])["function"]
            # The engine wrote a call, which only it can tell: the answer taught is
            # another message, as when a client goes its own way.
            sent = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": f["name"], "arguments": {"path": talk.text(40)}}}]}
            c["messages"] = c["messages"] + [sent, {"role": "tool", "content": talk.text(r.randint(30, 2500)), "tool_call_id": "call_1"}]
        else:
            c["messages"] = c["messages"] + [sent, {"role": "user", "content": talk.text(r.randint(20, 1500))}]
    out = sys.stdout
    json.dump({"name": args.name, "kind": args.kind, "license": args.license, "texts": talk.texts}, out, ensure_ascii=False, separators=(",", ":"))
    for line in lines:
        out.write("\n")
        json.dump(line, out, ensure_ascii=False, separators=(",", ":"))
    out.write("\n")
    print(args.name, len(lines), "requests", sum(map(len, requests)), "prompt tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
