"""Layers that come with derivatives of their own."""

from ._gru import GRU as GRU
from ._lstm import LSTM as LSTM
from ._recurrent import Recurrent as Recurrent
from ._rnn import RNN as RNN, RNNCell as RNNCell
