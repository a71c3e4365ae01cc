"""Recurrent layers: GRU, LSTM, RNN, and any cell over time."""
