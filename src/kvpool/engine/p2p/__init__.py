"""MooncakeConnectorV1: decode pulls from prefill what prefill has computed. See docs/p2p.md."""
