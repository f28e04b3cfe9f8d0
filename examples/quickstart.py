"""The shortest way in: downloads a small model the first time (93 MB), then answers on any machine."""

import pagedjax

llm = pagedjax.LLM("smollm2-135m-instruct")
sampling = pagedjax.SamplingParams(temperature=0, max_tokens=32)
for output in llm.generate(["The capital of France is", "Water boils at"], sampling):
    print(output.prompt, "->", output.outputs[0].text)
