"""Layers that come with derivatives of their own."""

from ._gradient_layers import (
    GradientClip as GradientClip,
    GradientNormClip as GradientNormClip,
    GradientProbe as GradientProbe,
    GradientReversal as GradientReversal,
    GradientScale as GradientScale,
)
from ._gru import GRU as GRU
from ._lru import LRU as LRU
from ._lstm import LSTM as LSTM
from ._min_gru import MinGRU as MinGRU
from ._min_lstm import MinLSTM as MinLSTM
from ._neurons import (
    ALIFState as ALIFState,
    CuBaLIFState as CuBaLIFState,
    LIFState as LIFState,
    LIState as LIState,
)
from ._quantize_model import (
    QuantizationReport as QuantizationReport,
    quantize_model as quantize_model,
)
from ._quantized_layers import (
    BinaryLinear as BinaryLinear,
    QuantizedConv as QuantizedConv,
    QuantizedLinear as QuantizedLinear,
    TernaryLinear as TernaryLinear,
)
from ._quantizers import (
    AbstractQuantizer as AbstractQuantizer,
    FakeQuantize as FakeQuantize,
    FSQ as FSQ,
    LSQ as LSQ,
    StraightThrough as StraightThrough,
)
from ._recurrent import Recurrent as Recurrent
from ._rnn import RNN as RNN, RNNCell as RNNCell
from ._s5 import S5 as S5
from ._spiking import (
    ALIFCell as ALIFCell,
    CuBaLIFCell as CuBaLIFCell,
    LICell as LICell,
    LIFCell as LIFCell,
)
from ._spiking_recurrent import (
    RALIFCell as RALIFCell,
    RCuBaLIFCell as RCuBaLIFCell,
    RLIFCell as RLIFCell,
)
from ._vector_quantizer import VectorQuantizer as VectorQuantizer
