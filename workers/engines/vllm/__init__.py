"""The vLLM engine: app, scheduler and worker in one process, weights and KV cache in the memory service.

The only package that imports vllm and torch. Importing the package itself, or ``smollm2``, needs neither.
"""
