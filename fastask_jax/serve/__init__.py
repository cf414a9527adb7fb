"""Token in, token out over HTTP: one engine that many clients share.

`service` owns the engine, on a thread of its own; `bodies` turns JSON into orders, `chat` messages;
`app` is the HTTP side, and `server` the process (`fastask serve`).  Learners use such servers as
replicas (`fastask_jax.fleet.http_link`).
"""
