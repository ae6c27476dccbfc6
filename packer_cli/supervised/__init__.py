"""Supervised records: from messages or prompts to text, and what of it is trained on.

messages.py       conversations of every dialect as OpenAI-style messages
templates.py      which chat template
chat_template.py  messages -> text, and where every turn begins and ends in it
arguments.py      further variables that a template reads, for all records or for one
shown.py          what of a conversation a template leaves out
turns.py          the characters that the assistant wrote, end of turn included
edges.py          where they begin and end in one kind of turn, held against prefixes
probes.py         conversations as their structure alone, to learn that from
renderer.py       messages -> Document(text, spans)
documents.py      record -> Document: all of it together
shorten.py        conversations that are too long
encoder.py        records -> tokens and trained flags
"""
