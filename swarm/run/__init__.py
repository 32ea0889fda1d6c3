"""A run: its signed manifest and its versions, and its members.

The owner signs a *run manifest*. The run's id is `<owner peer id>/<name>`.

For other rooms, by the names in docs/rooms.md: `admission`, `allowed`, `bounds`, `changes`,
`choice`, `clock`, `findings`, `heard_verdicts`, `invites`, `lease`, `links`, `manifest`,
`manifest_exchange`, `participant`, `recipes`, `records`, `registrar`, `run`, `toml`, `update`,
`work`
"""
