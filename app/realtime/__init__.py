"""Realtime sessions: conversations that live in the gateway, each response a relayed request."""
