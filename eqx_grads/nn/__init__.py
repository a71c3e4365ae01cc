"""Layers that come with derivatives of their own."""

from ._fixed_point import FixedPoint as FixedPoint
from ._gradient_layers import (
    GradientProbe as GradientProbe,
    GradientReversal as GradientReversal,
)
from ._linear_recurrent.lru import LRU as LRU
from ._linear_recurrent.minimal import MinGRU as MinGRU, MinLSTM as MinLSTM
from ._linear_recurrent.s5 import S5 as S5
from ._quantized.binary_ternary import (
    BinaryLinear as BinaryLinear,
    TernaryLinear as TernaryLinear,
)
from ._quantized.finite_scalar import FSQ as FSQ
from ._quantized.integers import to_integers as to_integers
from ._quantized.layers import (
    QuantizedConv as QuantizedConv,
    QuantizedLinear as QuantizedLinear,
)
from ._quantized.model import quantize_model as quantize_model
from ._quantized.quantizers import (
    AbstractQuantizer as AbstractQuantizer,
    FakeQuantize as FakeQuantize,
    LSQ as LSQ,
    StraightThrough as StraightThrough,
)
from ._quantized.report import QuantizationReport as QuantizationReport
from ._quantized.vector_quantizer import VectorQuantizer as VectorQuantizer
from ._recurrent.any_cell import Recurrent as Recurrent
from ._recurrent.gru import GRU as GRU
from ._recurrent.lstm import LSTM as LSTM
from ._recurrent.outputs import Outputs as Outputs
from ._recurrent.rnn import RNN as RNN, RNNCell as RNNCell
from ._spiking.cells import (
    ALIFCell as ALIFCell,
    CuBaLIFCell as CuBaLIFCell,
    LICell as LICell,
    LIFCell as LIFCell,
)
from ._spiking.layers import (
    ALIF as ALIF,
    CuBaLIF as CuBaLIF,
    LI as LI,
    LIF as LIF,
)
from ._spiking.parameters import (
    ALIFState as ALIFState,
    CuBaLIFState as CuBaLIFState,
    LIFState as LIFState,
    LIState as LIState,
)
from ._spiking.recurrent_cells import (
    RALIFCell as RALIFCell,
    RCuBaLIFCell as RCuBaLIFCell,
    RLIFCell as RLIFCell,
)
from ._spiking.recurrent_layers import (
    RALIF as RALIF,
    RCuBaLIF as RCuBaLIF,
    RLIF as RLIF,
)
from ._spiking.weighted_cell import WeightedCell as WeightedCell
