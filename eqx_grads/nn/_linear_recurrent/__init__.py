"""Recurrent layers whose recurrence is linear: LRU, S5, MinGRU, MinLSTM, S6, DeltaNet."""
