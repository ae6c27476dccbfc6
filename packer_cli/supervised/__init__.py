"""Supervised records: from messages or prompts to text, and what of it is trained on.

messages.py       conversations of every dialect as OpenAI-style messages
templates.py      which chat template
chat_template.py  messages -> text, and where every turn begins and ends in it
turns.py          the characters that the assistant wrote, end of turn included
documents.py      record -> Document(text, spans): all of it together
shorten.py        conversations that are too long
encoder.py        records -> tokens and trained flags
"""
