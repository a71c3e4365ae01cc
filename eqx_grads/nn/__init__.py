"""Layers that come with their own derivatives."""

from ._fixed_point import FixedPoint as FixedPoint
from ._gradient_layers import (
    GradientProbe as GradientProbe,
    GradientReversal as GradientReversal,
)
from ._linear_recurrent.delta_net import GatedDeltaNet as GatedDeltaNet
from ._linear_recurrent.lru import LRU as LRU
from ._linear_recurrent.minimal import MinGRU as MinGRU, MinLSTM as MinLSTM
from ._linear_recurrent.s5 import S5 as S5
from ._linear_recurrent.selective import SelectiveSSM as SelectiveSSM
from ._quantized.codebook import FSQ as FSQ
from ._quantized.integers import to_integers as to_integers
from ._quantized.model import quantize_model as quantize_model
from ._quantized.quantized import Quantized as Quantized
from ._quantized.quantizer import AbstractQuantizer as AbstractQuantizer
from ._quantized.report import QuantizationReport as QuantizationReport
from ._quantized.signs import Binary as Binary, Ternary as Ternary
from ._quantized.uniform import FakeQuantize as FakeQuantize, LSQ as LSQ
from ._quantized.vector_quantizer import VectorQuantizer as VectorQuantizer
from ._recurrent.gated import GRU as GRU, LSTM as LSTM, RNN as RNN
from ._recurrent.gated_cells import RNNCell as RNNCell
from ._recurrent.outputs import Outputs as Outputs
from ._recurrent.recurrent import Recurrent as Recurrent
from ._spiking.cell import LIFCell as LIFCell
from ._spiking.dynamics import LIFState as LIFState
from ._spiking.layers import LI as LI, LIF as LIF
