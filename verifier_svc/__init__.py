"""The verifier service: owns requests, the target model and the truth."""
