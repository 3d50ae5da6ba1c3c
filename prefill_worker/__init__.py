"""The prefill worker: owns a job, computes its prompt, offers the blocks, answers with a ticket."""
