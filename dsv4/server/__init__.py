"""The HTTP server: OpenAI's protocol over the scheduler, and a page to chat on. Needs the extra `serve`.

app.py            the routes;  guard.py  who may ask, and when;  limits.py  how much
asked.py          a request's body, checked (fields.py, conversation.py); faults.py  how it is refused
bridge.py         steps from the scheduler's threads to the event loop
replies.py        steps → completions;  chat_reply.py  → chat answers
metrics.py        /metrics;  page/  the page
serving.py        the socket, signals, and an orderly end
"""
