"""Prompts whose answers copy from them (quotes, code edits, extraction), and prompts with nothing to copy."""

from __future__ import annotations

_ARTICLE = (
    "The Great Barrier Reef is the world's largest coral reef system, composed of over 2,900 individual reefs and 900 "
    "islands stretching for over 2,300 kilometres. The reef is located in the Coral Sea, off the coast of Queensland, "
    "Australia. It can be seen from outer space and is the world's biggest single structure made by living organisms. "
    "This reef structure is composed of and built by billions of tiny organisms, known as coral polyps."
)
_CODE = '''def total_price(items, tax_rate):
    """Return the price of all items including tax."""
    subtotal = 0
    for item in items:
        subtotal = subtotal + item["price"] * item["quantity"]
    tax = subtotal * tax_rate
    return subtotal + tax


def print_receipt(items, tax_rate):
    """Print one line for each item and the total."""
    for item in items:
        print(item["name"], item["quantity"], item["price"])
    print("total", total_price(items, tax_rate))
'''
_JSON = (
    '{"order": 4711, "customer": {"name": "Ada Lovelace", "city": "London"}, "lines": ['
    '{"sku": "A-100", "quantity": 2, "price": "9.99"}, {"sku": "B-200", "quantity": 1, "price": "24.50"}, '
    '{"sku": "C-300", "quantity": 5, "price": "1.25"}]}'
)
_LOG = """2026-01-12 08:14:02 INFO  server started on port 8000
2026-01-12 08:14:09 WARN  cache is 91% full
2026-01-12 08:15:31 ERROR connection to database lost
2026-01-12 08:15:36 INFO  connection to database restored
2026-01-12 08:17:00 INFO  request 1842 served in 35 ms"""
_MINUTES = (
    "Anna said that the release is delayed by one week because the payment tests are still failing. Ben answered "
    "that he will fix the payment tests by Thursday and that Carla will review the changes on Friday. Carla "
    "agreed and asked everyone to write their release notes before Wednesday evening."
)

COPYING = (
    f"Repeat the following text word for word:\n\n{_ARTICLE}",
    f"Quote the first two sentences of this text exactly, then the last one:\n\n{_ARTICLE}",
    f"Summarize this text by quoting its most important sentences in full:\n\n{_ARTICLE}",
    f"Rewrite this code with the variable subtotal renamed to amount. Show all of it.\n\n```python\n{_CODE}```",
    f"Copy this code and add a comment above each function.\n\n```python\n{_CODE}```",
    f"Fix nothing in this code, print it again unchanged:\n\n```python\n{_CODE}```",
    f"Extract the lines of this order as a JSON list, copied exactly:\n\n{_JSON}",
    f"Print this JSON again with one field per line:\n\n{_JSON}",
    f"List every line of this log that is not INFO, then the whole log:\n\n{_LOG}",
    f"Copy this log and number its lines:\n\n{_LOG}",
    f"Write these minutes as a list, one sentence per line, without changing a word:\n\n{_MINUTES}",
    f"Who said what? Quote the minutes sentence by sentence:\n\n{_MINUTES}",
)

NOTHING_TO_COPY = (
    "Write a short poem about winter.",
    "Why is the sky blue?",
    "Tell me a joke about a programmer.",
    "Invent a name for a new planet and describe it.",
    "What should I cook tonight?",
    "Describe the taste of an orange.",
    "Give me advice for a job interview.",
    "Explain what a black hole is to a child.",
)
