"""Inference peers: they generate rollouts, prove them, and hand them to validators.

For other rooms: `delivery`: Deliveries; `outbox`: Made; `pending`: PendingSubmission; `role`:
InferenceRole
"""
